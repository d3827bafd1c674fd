// kvlathe::Attend as a custom operator of ONNX Runtime, on its CPU provider and its threads.
//
// ONNX Runtime takes a registered operator before the function of the same name that the model carries, so one model.onnx
// runs with this library and without it. Inputs are those of docs/attend.md; the last one, `layout`, tells which there are.
// This operator writes the step's k' and v' to the pool, which the function leaves to the session.
#include <array>
#include <cstdlib>
#include <string>
#include <vector>

#include "kvlathe/cpu.h"
#include "../cpu/layer.h"
#include "../cpu/numbers.h"
#include "../cpu/select.h"
#include "../cpu/work.h"
#include "ort_abi.h"

namespace kvlathe {
namespace {

namespace ort = ort_abi;
const OrtApi* api = nullptr;

// An OrtStatus on its way out, as an exception inside this file.
struct Failed {
  OrtStatus* status;
};

void check(OrtStatus* status) {
  if (status) throw Failed{status};
}

template <class Body>
OrtStatus* reported(Body body) noexcept {
  try {
    body();
    return nullptr;
  } catch (const Failed& failed) {
    return failed.status;
  } catch (const std::exception& error) {
    return ort::CreateStatus::call(api, ort::kFail, (std::string("kvlathe::Attend: ") + error.what()).c_str());
  }
}

struct Tensor {
  void* data;
  std::vector<int64_t> shape;
  int64_t bytes;  // an element

  explicit Tensor(const OrtValue* value) {
    OrtTensorTypeAndShapeInfo* info;
    size_t count;
    int type;
    check(ort::GetTensorTypeAndShape::call(api, value, &info));
    check(ort::GetDimensionsCount::call(api, info, &count));
    shape.resize(count);
    check(ort::GetDimensions::call(api, info, shape.data(), count));
    check(ort::GetTensorElementType::call(api, info, &type));
    ort::ReleaseTensorTypeAndShapeInfo::call<void>(api, info);
    check(ort::GetTensorMutableData::call(api, const_cast<OrtValue*>(value), &data));
    bytes = type == ort::kUint8 ? 1 : type == ort::kHalf ? 2 : 4;
  }

  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
  int64_t size() const {
    int64_t total = bytes;
    for (int64_t n : shape) total *= n;
    return total;
  }
};

// The inputs of one call, taken in the order of the node.
struct Inputs {
  const OrtKernelContext* context;
  size_t next = 0;

  Tensor take() {
    const OrtValue* value;
    check(ort::KernelContext_GetInput::call(api, context, next++, &value));
    return Tensor(value);
  }
};

// The kernels compute in float: an engine in half precision is widened on the way in and rounded on the way out.
void widen(const Tensor& from, float* to) {
  const auto* halves = from.as<uint16_t>();
  const int64_t count = from.size() / 2, whole = count / 16 * 16;
  Rows rows{};
  rows.data = from.as<uint8_t>(), rows.bits = 16, rows.rows = 1, rows.inner = int32_t(whole);
  int64_t ld;
  if (whole) kernels_for(KVLATHE_ISA_AUTO).unpack(rows, to, &ld);
  for (int64_t i = whole; i < count; ++i) to[i] = float_of_half(halves[i]);
}

class Kernel {
 public:
  explicit Kernel(const OrtKernelInfo* info) : layer_(table(info)) {
    const TableHeader& t = layer_.head;
    size_t outputs;
    check(ort::KernelInfoGetAttribute_float::call(api, info, "scale", &scale_));
    check(ort::KernelInfo_GetOutputCount::call(api, info, &outputs));
    observes_ = outputs > 2;
    const size_t pools = size_t((t.pools & 1) + (t.pools >> 1 & 1) + (t.pools >> 2 & 1));
    const size_t first = (t.rope ? 8 : 6) + size_t(t.buckets) + pools;  // of proj_q, proj_k, centre_k, in the order that compute() takes
    for (size_t i = 0; t.projected && i < projections_.size(); ++i) {
      const Tensor projection = constant(info, first + i, "of the projections");
      if (projection.bytes == 2) projections_[i].resize(size_t(projection.size() / 2)), widen(projection, projections_[i].data());
    }
  }

  void compute(OrtKernelContext* context) const {
    thread_local Buffer wide_inputs[5], wide_output;
    const TableHeader& t = layer_.head;
    Inputs in{context};
    const Tensor q = in.take(), k = in.take(), v = in.take();
    kvlathe_attend_args a{};
    a.abi_version = KVLATHE_ABI_VERSION;
    a.scale = scale_;
    a.q = floats(q, wide_inputs[0]), a.k = floats(k, wide_inputs[1]), a.v = floats(v, wide_inputs[2]);
    if (t.rope) a.cos = floats(in.take(), wide_inputs[3]), a.sin = floats(in.take(), wide_inputs[4]);
    a.query_starts = in.take().as<int32_t>();
    const Tensor offsets = in.take();  // only their number matters, and to the mass alone
    const Tensor lengths = in.take();
    a.lengths = lengths.as<int32_t>();
    std::vector<const int32_t*> tables;
    std::vector<int32_t> widths;
    for (int32_t s = 0; s < t.buckets; ++s) {
      const Tensor pages = in.take();
      tables.push_back(pages.as<int32_t>());
      widths.push_back(int32_t(pages.shape[1]));
    }
    a.page_tables = tables.data(), a.page_table_widths = widths.data();
    for (int32_t view = 0; view < 3; ++view) {
      if (!(t.pools >> view & 1)) continue;
      const Tensor pool = in.take();
      a.pool = pool.data, a.pool_bytes = pool.size();
    }
    if (t.projected) a.proj_q = projection(in.take(), 0), a.proj_k = projection(in.take(), 1), a.centre_k = projection(in.take(), 2);
    if (observes_) a.probe_weights = in.take().as<float>();
    check_shapes(q, k, v, lengths);
    a.tokens = int32_t(q.shape[0]), a.batch = int32_t(lengths.shape[0]);
    void* o = output(context, 0, {a.tokens, layer_.o_width});
    const int64_t o_size = a.tokens * layer_.o_width;
    a.o = q.bytes == 2 ? wide_output.floats(size_t(o_size)) : static_cast<float*>(o);
    a.rows = output(context, 1, {a.tokens, layer_.rows_width});
    if (observes_) {
      for (int32_t width : widths) a.mass_places += int64_t{width} * t.page_tokens;
      a.mass_places += offsets.shape[0];
      a.mass = static_cast<float*>(output(context, 2, {a.batch, t.lanes, a.mass_places}));
    }
    a.parallel = {run_on_ort, context};
    kvlathe_status status;
    if (kvlathe_cpu_attend(&layer_, &a, &status)) throw Refusal(kvlathe_code(status.code), status.message);
    if (q.bytes == 2) kernels_for(KVLATHE_ISA_AUTO).store(a.o, nullptr, int(o_size), 16, o);
  }

 private:
  static Tensor constant(const OrtKernelInfo* info, size_t index, const std::string& name) {
    int found = 0;
    const OrtValue* value = nullptr;
    check(ort::KernelInfoGetConstantInput_tensor::call(api, info, index, &found, &value));
    if (!found) throw Refusal(KVLATHE_BAD_ARGUMENT, "input " + std::to_string(index) + ", " + name + ", is not a constant");
    return Tensor(value);
  }

  static std::vector<int32_t> table(const OrtKernelInfo* info) {
    size_t count;
    check(ort::KernelInfo_GetInputCount::call(api, info, &count));
    const Tensor tensor = constant(info, count - 1, "layout");
    return {tensor.as<int32_t>(), tensor.as<int32_t>() + tensor.size() / 4};
  }

  static const float* floats(const Tensor& x, Buffer& buffer) {
    if (x.bytes != 2) return x.as<float>();
    float* wide = buffer.floats(size_t(x.size() / 2));
    widen(x, wide);
    return wide;
  }

  const float* projection(const Tensor& x, size_t which) const { return x.bytes == 2 ? projections_[which].data() : x.as<float>(); }

  void check_shapes(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& lengths) const {
    const bool ok = q.shape.size() == 2 && q.shape[1] == layer_.q_width && k.shape[1] == layer_.k_width && v.shape[1] == layer_.v_width &&
                    lengths.shape.size() == 2 && lengths.shape[1] == layer_.head.buckets && k.bytes == q.bytes && v.bytes == q.bytes;
    if (!ok) throw Refusal(KVLATHE_BAD_ARGUMENT, "an input's shape or type contradicts the layout");
  }

  static void* output(OrtKernelContext* context, size_t index, const std::vector<int64_t>& shape) {
    OrtValue* value;
    void* data;
    check(ort::KernelContext_GetOutput::call(api, context, index, shape.data(), shape.size(), &value));
    check(ort::GetTensorMutableData::call(api, value, &data));
    return data;
  }

  static void run_on_ort(void* context, void (*body)(void*, size_t), size_t count, void* state) {
    OrtStatus* failed = ort::KernelContext_ParallelFor::call(api, static_cast<const OrtKernelContext*>(context), body, count, 0, state);
    if (!failed) return;
    ort::ReleaseStatus::call<void>(api, failed);
    body(state, 0);  // drains whatever is left
  }

  kvlathe_layer layer_;
  bool observes_ = false;  // the plan has a probe
  std::array<std::vector<float>, 3> projections_;  // of an engine in half precision: proj_q, proj_k, centre_k in float
  float scale_ = 1;
};

template <int kElement, int kRows>
OrtCustomOp attend_op() {
  OrtCustomOp op{};
  op.version = ort::kVersion;
  op.GetName = [](const OrtCustomOp*) { return "Attend"; };
  op.GetExecutionProviderType = [](const OrtCustomOp*) { return "CPUExecutionProvider"; };
  op.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return 1; };
  op.GetInputType = [](const OrtCustomOp*, size_t) { return int(ort::kUndefined); };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t) { return int(ort::kVariadic); };
  op.GetInputMemoryType = [](const OrtCustomOp*, size_t) { return ort::kMemoryDefault; };
  op.GetVariadicInputMinArity = [](const OrtCustomOp*) { return 1; };
  op.GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 0; };
  op.GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return 3; };
  op.GetOutputType = [](const OrtCustomOp*, size_t i) { return i == 0 ? kElement : i == 1 ? kRows : int(ort::kFloat); };
  op.GetOutputCharacteristic = [](const OrtCustomOp*, size_t i) { return int(i == 2 ? ort::kOptional : ort::kRequired); };
  op.GetStartVersion = [](const OrtCustomOp*) { return 1; };
  op.GetEndVersion = [](const OrtCustomOp*) { return 1; };
  op.CreateKernelV2 = [](const OrtCustomOp*, const OrtApi*, const OrtKernelInfo* info, void** kernel) {
    return reported([&] { *kernel = new Kernel(info); });
  };
  op.KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
    return reported([&] { static_cast<const Kernel*>(kernel)->compute(context); });
  };
  op.KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  return op;
}

// Whether a session option names 16 bits: kvlathe.element_bits those of o, kvlathe.hot_bits those of the output `rows`.
bool half(const OrtSessionOptions* options, const char* name) {
  int has = 0;
  char value[8] = "";
  size_t size = sizeof value;
  check(ort::HasSessionConfigEntry::call(api, options, name, &has));
  if (has) check(ort::GetSessionConfigEntry::call(api, options, name, value, &size));
  return std::atoi(value) == 16;
}

}  // namespace
}  // namespace kvlathe

// What SessionOptions.register_custom_ops_library calls.
extern "C" KVLATHE_API OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  using namespace kvlathe;
  static const OrtCustomOp ops[2][2] = {{attend_op<ort::kFloat, ort::kFloat>(), attend_op<ort::kFloat, ort::kHalf>()},
                                        {attend_op<ort::kHalf, ort::kFloat>(), attend_op<ort::kHalf, ort::kHalf>()}};
  api = base->GetApi(ort::kVersion);
  if (!api) return nullptr;  // older than 1.17: the function runs instead
  return reported([&] {
    OrtCustomOpDomain* domain;  // lives as long as the process, like the library
    check(ort::CreateCustomOpDomain::call(api, "kvlathe", &domain));
    check(ort::CustomOpDomain_Add::call(api, domain, &ops[half(options, "kvlathe.element_bits")][half(options, "kvlathe.hot_bits")]));
    check(ort::AddCustomOpDomain::call(api, options, domain));
  });
}
