// kvlathe::Attend on ONNX Runtime's CUDA provider and its stream: every input is in device memory,
// and is read there.
//
// A constant is on the device when a kernel is made of it, so the layer's table is taken from the
// attribute of the same name.
#include "adapters/node/attend_node.h"
#include "adapters/ort/ort_value.h"

namespace kvlathe {
namespace {

std::vector<int32_t> table_of(const OrtKernelInfo* info) {
  size_t count = 0;
  check(ort::KernelInfoGetAttributeArray_int64::call(api, info, "layout",
                                                     static_cast<int64_t*>(nullptr), &count));
  std::vector<int64_t> table(count);
  check(ort::KernelInfoGetAttributeArray_int64::call(api, info, "layout", table.data(), &count));
  return {table.begin(), table.end()};
}

// Memory of the provider for the length of a call: what is queued before it is given back has it,
// for there is one stream.
class Scratch {
 public:
  Scratch(const OrtKernelContext* context, const Tensor& neighbour, size_t bytes) {
    const OrtMemoryInfo* where;
    check(ort::GetTensorMemoryInfo::call(api, neighbour.value, &where));
    check(ort::KernelContext_GetAllocator::call(api, context, where, &allocator_));
    OrtStatus* failed = ort::AllocatorAlloc::call(api, allocator_, bytes, &data);
    if (!failed) return;
    ort::ReleaseAllocator::call<void>(api, allocator_);
    throw Failed{failed};
  }
  Scratch(const Scratch&) = delete;
  ~Scratch() {
    ort::ReleaseStatus::call<void>(api, ort::AllocatorFree::call(api, allocator_, data));
    ort::ReleaseAllocator::call<void>(api, allocator_);
  }
  void* data = nullptr;

 private:
  OrtAllocator* allocator_ = nullptr;
};

class DeviceKernel {
 public:
  static constexpr char kProvider[] = "CUDAExecutionProvider";

  explicit DeviceKernel(const OrtKernelInfo* info)
      : node_(table_of(info), scale_of(info)), inputs_(inputs_of(info)) {
    if (observes(info))
      throw Refusal(
          KVLATHE_UNSUPPORTED,
          "the plan ranks tokens by what attends them, which the CUDA kernels do not report");
    if (softcap_of(info) != 0 || has_sinks(info))
      throw Refusal(
          KVLATHE_UNSUPPORTED,
          "the model bounds its scores or has sink logits, which this node does not compute on a "
          "GPU: run it with --device cpu");
  }

  void compute(OrtKernelContext* context) const {
    Inputs next{context};
    std::vector<Tensor> tensors;
    std::vector<NodeInput> in;
    for (size_t i = 0; i < inputs_; ++i) tensors.push_back(next.take());
    for (const Tensor& x : tensors) in.push_back({x.data, int32_t(x.shape.size()), x.shape.data()});
    const Tensor& q = tensors[size_t(node_.places.q)];
    if (q.bytes != 2)
      throw Refusal(KVLATHE_UNSUPPORTED, "the CUDA kernels compute engines in float16");
    node_.check(in);
    void* o = output(context, 0, {q.shape[0], node_.layer.o_width});
    void* rows = output(context, 1, {q.shape[0], node_.layer.rows_width});
    void* stream;
    check(ort::KernelContext_GetGPUComputeStream::call(api, context, &stream));
    const size_t bytes = node_.workspace_bytes(in);
    const Scratch scratch(context, q, bytes);
    node_.run(in, o, rows, scratch.data, bytes, stream);
  }

 private:
  const Node node_;
  const size_t inputs_;
};

}  // namespace

const OrtCustomOp* cuda_op() {
  static const OrtCustomOp op = attend_op<DeviceKernel, ort::kHalf, ort::kHalf>();
  return &op;
}

}  // namespace kvlathe
