// The part of ONNX Runtime's C ABI that a custom operator needs, in our own words: no package ships
// its header.
//
// GetApi(17) returns a table of function pointers in which a place, once taken, never moves, so a
// call is its place and its signature. Version 17 is the first with all of these; every later ONNX
// Runtime serves it.
#pragma once
#include <cstddef>
#include <cstdint>

struct OrtApi;  // the table
struct OrtStatus;
struct OrtValue;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtTensorTypeAndShapeInfo;
struct OrtMemoryInfo;
struct OrtAllocator;

struct OrtApiBase {
  const OrtApi* (*GetApi)(uint32_t version);  // null if this ONNX Runtime is older
  const char* (*GetVersionString)();
};

// What the runtime asks an operator; filled by us. Sizes, types and names as in the ABI's
// version 17.
struct OrtCustomOp {
  uint32_t version;
  void* (*CreateKernel)(const OrtCustomOp*, const OrtApi*,
                        const OrtKernelInfo*);  // superseded by CreateKernelV2
  const char* (*GetName)(const OrtCustomOp*);
  const char* (*GetExecutionProviderType)(const OrtCustomOp*);
  int (*GetInputType)(const OrtCustomOp*, size_t index);
  size_t (*GetInputTypeCount)(const OrtCustomOp*);
  int (*GetOutputType)(const OrtCustomOp*, size_t index);
  size_t (*GetOutputTypeCount)(const OrtCustomOp*);
  void (*KernelCompute)(void* kernel, OrtKernelContext*);  // superseded by KernelComputeV2
  void (*KernelDestroy)(void* kernel);
  int (*GetInputCharacteristic)(const OrtCustomOp*, size_t index);
  int (*GetOutputCharacteristic)(const OrtCustomOp*, size_t index);
  int (*GetInputMemoryType)(const OrtCustomOp*, size_t index);
  int (*GetVariadicInputMinArity)(const OrtCustomOp*);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp*);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp*);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp*);
  OrtStatus* (*CreateKernelV2)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*,
                               void** kernel);
  OrtStatus* (*KernelComputeV2)(void* kernel, OrtKernelContext*);
  OrtStatus* (*InferOutputShapeFn)(const OrtCustomOp*, void*);
  int (*GetStartVersion)(const OrtCustomOp*);
  int (*GetEndVersion)(const OrtCustomOp*);
};
static_assert(sizeof(OrtCustomOp) == 22 * sizeof(void*));

namespace kvlathe::ort_abi {

constexpr uint32_t kVersion = 17;
enum Element : int { kUndefined = 0, kFloat = 1, kUint8 = 2, kHalf = 10 };
enum Characteristic : int { kRequired = 0, kOptional = 1, kVariadic = 2 };
constexpr int kFail = 1, kMemoryDefault = 0;

// The function at a place of the table.
template <size_t kPlace, class... Args>
struct Call {
  template <class Result = OrtStatus*>
  static Result call(const OrtApi* api, Args... args) {
    using Function = Result (*)(Args...);
    return reinterpret_cast<Function>(reinterpret_cast<void* const*>(api)[kPlace])(args...);
  }
};

using CreateStatus = Call<0, int, const char*>;
using CreateCustomOpDomain = Call<26, const char*, OrtCustomOpDomain**>;
using CustomOpDomain_Add = Call<27, OrtCustomOpDomain*, const OrtCustomOp*>;
using AddCustomOpDomain = Call<28, OrtSessionOptions*, OrtCustomOpDomain*>;
using GetTensorMutableData = Call<51, OrtValue*, void**>;
using GetTensorElementType = Call<60, const OrtTensorTypeAndShapeInfo*, int*>;
using GetDimensionsCount = Call<61, const OrtTensorTypeAndShapeInfo*, size_t*>;
using GetDimensions = Call<62, const OrtTensorTypeAndShapeInfo*, int64_t*, size_t>;
using GetTensorTypeAndShape = Call<65, const OrtValue*, OrtTensorTypeAndShapeInfo**>;
using AllocatorAlloc = Call<75, OrtAllocator*, size_t, void**>;
using AllocatorFree = Call<76, OrtAllocator*, void*>;
using KernelInfoGetAttribute_float = Call<85, const OrtKernelInfo*, const char*, float*>;
using KernelInfoGetAttribute_int64 = Call<86, const OrtKernelInfo*, const char*, int64_t*>;
using KernelContext_GetInput = Call<90, const OrtKernelContext*, size_t, const OrtValue**>;
using KernelContext_GetOutput =
    Call<91, OrtKernelContext*, size_t, const int64_t*, size_t, OrtValue**>;
using ReleaseStatus = Call<93, OrtStatus*>;                                  // returns nothing
using ReleaseTensorTypeAndShapeInfo = Call<99, OrtTensorTypeAndShapeInfo*>;  // returns nothing
using ReleaseAllocator = Call<132, OrtAllocator*>;                           // returns nothing
using KernelInfoGetAttributeArray_int64 =
    Call<163, const OrtKernelInfo*, const char*, int64_t*, size_t*>;
using KernelContext_GetGPUComputeStream = Call<193, const OrtKernelContext*, void**>;
using GetTensorMemoryInfo = Call<194, const OrtValue*, const OrtMemoryInfo**>;
using KernelInfo_GetInputCount = Call<230, const OrtKernelInfo*, size_t*>;
using KernelInfo_GetOutputCount = Call<231, const OrtKernelInfo*, size_t*>;
using HasSessionConfigEntry = Call<237, const OrtSessionOptions*, const char*, int*>;
using GetSessionConfigEntry = Call<238, const OrtSessionOptions*, const char*, char*, size_t*>;
using KernelInfoGetConstantInput_tensor =
    Call<249, const OrtKernelInfo*, size_t, int*, const OrtValue**>;
using KernelContext_GetAllocator =
    Call<253, const OrtKernelContext*, const OrtMemoryInfo*, OrtAllocator**>;
using KernelContext_ParallelFor =
    Call<274, const OrtKernelContext*, void (*)(void*, size_t), size_t, size_t, void*>;

}  // namespace kvlathe::ort_abi
