// Tensors and outputs of a custom operator's call in C++, and the operator's form for any kernel
// class.
#pragma once

#include <string>
#include <vector>

#include "adapters/ort/ort_abi.h"
#include "common/refusal.h"

namespace kvlathe {

namespace ort = ort_abi;
inline const OrtApi* api = nullptr;  // set once, when the library is registered

// An OrtStatus on its way out, as an exception inside these files.
struct Failed {
  OrtStatus* status;
};

inline void check(OrtStatus* status) {
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
    return ort::CreateStatus::call(api, ort::kFail,
                                   (std::string("kvlathe::Attend: ") + error.what()).c_str());
  }
}

struct Tensor {
  const OrtValue* value;
  void* data;
  std::vector<int64_t> shape;
  int64_t bytes;  // an element

  explicit Tensor(const OrtValue* value) : value(value) {
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

inline void* output(OrtKernelContext* context, size_t index, const std::vector<int64_t>& shape) {
  OrtValue* value;
  void* data;
  check(
      ort::KernelContext_GetOutput::call(api, context, index, shape.data(), shape.size(), &value));
  check(ort::GetTensorMutableData::call(api, value, &data));
  return data;
}

inline float scale_of(const OrtKernelInfo* info) {
  float scale;
  check(ort::KernelInfoGetAttribute_float::call(api, info, "scale", &scale));
  return scale;
}

// An attribute that models without it do not carry: `value` then stays as it was.
template <class Read, class T>
T optional(const OrtKernelInfo* info, const char* name, T value) {
  OrtStatus* missing = Read::call(api, info, name, &value);
  if (missing) ort::ReleaseStatus::call<void>(api, missing);
  return value;
}

// What bounds the scores; 0: nothing.
inline float softcap_of(const OrtKernelInfo* info) {
  return optional<ort::KernelInfoGetAttribute_float>(info, "softcap", 0.f);
}

inline bool has_sinks(const OrtKernelInfo* info) {
  return optional<ort::KernelInfoGetAttribute_int64>(info, "sinks", int64_t{0}) != 0;
}

inline size_t inputs_of(const OrtKernelInfo* info) {
  size_t count;
  check(ort::KernelInfo_GetInputCount::call(api, info, &count));
  return count;
}

// Whether the plan has an observation window: the node then has a third output, the mass.
inline bool observes(const OrtKernelInfo* info) {
  size_t outputs;
  check(ort::KernelInfo_GetOutputCount::call(api, info, &outputs));
  return outputs > 2;
}

// The operator: `Kernel` has a constructor from OrtKernelInfo, compute(OrtKernelContext*), and
// kProvider.
template <class Kernel, int kElement, int kRows>
OrtCustomOp attend_op() {
  OrtCustomOp op{};
  op.version = ort::kVersion;
  op.GetName = [](const OrtCustomOp*) { return "Attend"; };
  op.GetExecutionProviderType = [](const OrtCustomOp*) { return Kernel::kProvider; };
  op.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return 1; };
  op.GetInputType = [](const OrtCustomOp*, size_t) { return int(ort::kUndefined); };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t) { return int(ort::kVariadic); };
  op.GetInputMemoryType = [](const OrtCustomOp*, size_t) { return ort::kMemoryDefault; };
  op.GetVariadicInputMinArity = [](const OrtCustomOp*) { return 1; };
  op.GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 0; };
  op.GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return 3; };
  op.GetOutputType = [](const OrtCustomOp*, size_t i) {
    return i == 0 ? kElement : i == 1 ? kRows : int(ort::kFloat);
  };
  op.GetOutputCharacteristic = [](const OrtCustomOp*, size_t i) {
    return int(i == 2 ? ort::kOptional : ort::kRequired);
  };
  op.GetStartVersion = [](const OrtCustomOp*) { return 1; };
  op.GetEndVersion = [](const OrtCustomOp*) { return 1; };
  op.CreateKernelV2 = [](const OrtCustomOp*, const OrtApi*, const OrtKernelInfo* info,
                         void** kernel) { return reported([&] { *kernel = new Kernel(info); }); };
  op.KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
    return reported([&] { static_cast<const Kernel*>(kernel)->compute(context); });
  };
  op.KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  return op;
}

// The operator on the CPU, by the element types of o and of rows; and on a GPU, where both are
// halves.
const OrtCustomOp* cpu_op(bool half, bool half_rows);
const OrtCustomOp* cuda_op();

}  // namespace kvlathe
