// kvlathe::Attend on ONNX Runtime's CPU provider and its threads.
//
// Inputs are those of docs/attend.md; the last one, `layout`, tells which there are. The step's k'
// and v' are written to the pool, which the function leaves to the session.
#include <array>
#include <vector>

#include "adapters/ort/ort_value.h"
#include "common/layer_table.h"
#include "cpu/numbers.h"
#include "cpu/select.h"
#include "cpu/work.h"
#include "kvlathe/cpu.h"

namespace kvlathe {
namespace {

// The kernels compute in float: an engine in half precision is widened on the way in and rounded on
// the way out.
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
  static constexpr char kProvider[] = "CPUExecutionProvider";

  explicit Kernel(const OrtKernelInfo* info)
      : layer_(table(info)),
        observes_(observes(info)),
        scale_(scale_of(info)),
        softcap_(softcap_of(info)),
        sinks_(has_sinks(info)) {
    const TableHeader& t = layer_.head;
    size_t pools = 0;
    for (PoolView view : kPoolViews) pools += (t.pools & view) != 0;
    const size_t first = (t.rope ? 8 : 6) + size_t(t.buckets) +
                         pools;  // of proj_q, proj_k, centre_k, in the order that compute() takes
    for (size_t i = 0; t.projected && i < projections_.size(); ++i) {
      const Tensor projection = constant(info, first + i, "of the projections");
      if (projection.bytes == 2)
        projections_[i].resize(size_t(projection.size() / 2)),
            widen(projection, projections_[i].data());
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
    a.softcap = softcap_;
    a.q = floats(q, wide_inputs[0]), a.k = floats(k, wide_inputs[1]),
    a.v = floats(v, wide_inputs[2]);
    if (t.rope)
      a.cos = floats(in.take(), wide_inputs[3]), a.sin = floats(in.take(), wide_inputs[4]);
    a.cu_seqlens_q = in.take().as<int32_t>();
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
    for (PoolView view : kPoolViews) {
      if (!(t.pools & view)) continue;
      const Tensor pool = in.take();
      a.pool = pool.data, a.pool_bytes = pool.size();
    }
    if (t.projected)
      a.proj_q = projection(in.take(), 0), a.proj_k = projection(in.take(), 1),
      a.centre_k = projection(in.take(), 2);
    if (sinks_) a.sinks = in.take().as<float>();
    if (observes_) {
      const Tensor weights = in.take();  // empty: no row is observed, and there is no mass
      if (weights.size()) a.observation_weights = weights.as<float>();
    }
    check_shapes(q, k, v, lengths);
    a.tokens = int32_t(q.shape[0]), a.batch = int32_t(lengths.shape[0]);
    void* o = output(context, 0, {a.tokens, layer_.o_width});
    const int64_t o_size = a.tokens * layer_.o_width;
    a.o = q.bytes == 2 ? wide_output.floats(size_t(o_size)) : static_cast<float*>(o);
    a.rows = output(context, 1, {a.tokens, layer_.rows_width});
    if (observes_) {
      if (a.observation_weights) {
        for (int32_t width : widths) a.mass_places += int64_t{width} * t.page_tokens;
        a.mass_places += offsets.shape[0];
      }
      a.mass = static_cast<float*>(output(context, 2, {a.batch, t.lanes, a.mass_places}));
    }
    a.parallel = {run_on_ort, context};
    kvlathe_status status;
    if (kvlathe_cpu_attend(&layer_, &a, &status))
      throw Refusal(kvlathe_code(status.code), status.message);
    if (q.bytes == 2) kernels_for(KVLATHE_ISA_AUTO).store(a.o, nullptr, int(o_size), 16, o);
  }

 private:
  static Tensor constant(const OrtKernelInfo* info, size_t index, const std::string& name) {
    int found = 0;
    const OrtValue* value = nullptr;
    check(ort::KernelInfoGetConstantInput_tensor::call(api, info, index, &found, &value));
    if (!found)
      throw Refusal(KVLATHE_BAD_ARGUMENT,
                    "input " + std::to_string(index) + ", " + name + ", is not a constant");
    return Tensor(value);
  }

  static std::vector<int32_t> table(const OrtKernelInfo* info) {
    const Tensor tensor = constant(info, inputs_of(info) - 1, "layout");
    return {tensor.as<int32_t>(), tensor.as<int32_t>() + tensor.size() / 4};
  }

  static const float* floats(const Tensor& x, Buffer& buffer) {
    if (x.bytes != 2) return x.as<float>();
    float* wide = buffer.floats(size_t(x.size() / 2));
    widen(x, wide);
    return wide;
  }

  const float* projection(const Tensor& x, size_t which) const {
    return x.bytes == 2 ? projections_[which].data() : x.as<float>();
  }

  void check_shapes(const Tensor& q, const Tensor& k, const Tensor& v,
                    const Tensor& lengths) const {
    const bool ok = q.shape.size() == 2 && q.shape[1] == layer_.q_width &&
                    k.shape[1] == layer_.k_width && v.shape[1] == layer_.v_width &&
                    lengths.shape.size() == 2 && lengths.shape[1] == layer_.head.buckets &&
                    k.bytes == q.bytes && v.bytes == q.bytes;
    if (!ok) throw Refusal(KVLATHE_BAD_ARGUMENT, "an input's shape or type contradicts the layout");
  }

  static void run_on_ort(void* context, void (*body)(void*, size_t), size_t count, void* state) {
    OrtStatus* failed = ort::KernelContext_ParallelFor::call(
        api, static_cast<const OrtKernelContext*>(context), body, count, 0, state);
    if (!failed) return;
    ort::ReleaseStatus::call<void>(api, failed);
    body(state, 0);  // drains whatever is left
  }

  kvlathe_layer layer_;
  bool observes_;
  std::array<std::vector<float>, 3>
      projections_;  // of an engine in half precision: proj_q, proj_k, centre_k in float
  float scale_, softcap_;
  bool sinks_;
};

}  // namespace

const OrtCustomOp* cpu_op(bool half, bool half_rows) {
  static const OrtCustomOp ops[2][2] = {
      {attend_op<Kernel, ort::kFloat, ort::kFloat>(), attend_op<Kernel, ort::kFloat, ort::kHalf>()},
      {attend_op<Kernel, ort::kHalf, ort::kFloat>(), attend_op<Kernel, ort::kHalf, ort::kHalf>()}};
  return &ops[half][half_rows];
}

}  // namespace kvlathe
