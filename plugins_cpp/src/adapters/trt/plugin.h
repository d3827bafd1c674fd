// kvlathe::Attend as an IPluginV3: what TensorRT asks, answered from one layer's table.
//
// The table (layer_table of kvlathe/plan/layer_table.py) comes as the field `layout`, so shapes,
// types and the meaning of every input are known and checked when the plugin is created. The cache
// is updated in place: output `pool` is the input pool_f16.
#pragma once

#include <NvInfer.h>

#include <memory>
#include <string>
#include <vector>

#include "adapters/node/attend_node.h"

#if NV_TENSORRT_MAJOR < 10 || (NV_TENSORRT_MAJOR == 10 && NV_TENSORRT_MINOR < 3)
#error "the plugin needs the headers of TensorRT 10.3 or later: aliased plugin outputs"
#endif

namespace kvlathe::trt {

constexpr char kName[] = "Attend", kVersion[] = "1", kNamespace[] = "kvlathe";

enum Output : int32_t { kO = 0, kRows = 1, kPool = 2, kOutputs = 3 };

class Plugin final : public nvinfer1::IPluginV3,
                     public nvinfer1::IPluginV3OneCore,
                     public nvinfer1::IPluginV3OneBuildV2,
                     public nvinfer1::IPluginV3OneRuntime {
 public:
  // `node`: one layer, read once and shared by all clones.
  Plugin(std::shared_ptr<const Node> node, nvinfer1::TensorRTPhase phase);

  nvinfer1::IPluginCapability* getCapabilityInterface(
      nvinfer1::PluginCapabilityType type) noexcept override;
  nvinfer1::IPluginV3* clone() noexcept override;
  char const* getPluginName() const noexcept override { return kName; }
  char const* getPluginVersion() const noexcept override { return kVersion; }
  char const* getPluginNamespace() const noexcept override { return kNamespace; }

  int32_t getNbOutputs() const noexcept override { return kOutputs; }
  int32_t getOutputDataTypes(nvinfer1::DataType* types, int32_t outputs,
                             nvinfer1::DataType const* inputTypes,
                             int32_t inputs) const noexcept override;
  int32_t getOutputShapes(nvinfer1::DimsExprs const* in, int32_t inputs,
                          nvinfer1::DimsExprs const* shapeIn, int32_t shapeInputs,
                          nvinfer1::DimsExprs* out, int32_t outputs,
                          nvinfer1::IExprBuilder& builder) noexcept override;
  bool supportsFormatCombination(int32_t at, nvinfer1::DynamicPluginTensorDesc const* tensors,
                                 int32_t inputs, int32_t outputs) noexcept override;
  int32_t configurePlugin(nvinfer1::DynamicPluginTensorDesc const* in, int32_t inputs,
                          nvinfer1::DynamicPluginTensorDesc const* out,
                          int32_t outputs) noexcept override;
  size_t getWorkspaceSize(nvinfer1::DynamicPluginTensorDesc const* in, int32_t inputs,
                          nvinfer1::DynamicPluginTensorDesc const* out,
                          int32_t outputs) const noexcept override;
  int32_t getAliasedInput(int32_t output) noexcept override;

  int32_t onShapeChange(nvinfer1::PluginTensorDesc const* in, int32_t inputs,
                        nvinfer1::PluginTensorDesc const* out, int32_t outputs) noexcept override;
  int32_t enqueue(nvinfer1::PluginTensorDesc const* inDesc,
                  nvinfer1::PluginTensorDesc const* outDesc, void const* const* in,
                  void* const* out, void* workspace, cudaStream_t stream) noexcept override;
  nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext*) noexcept override {
    return clone();
  }
  nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept override;

 private:
  bool float_input(int32_t at) const;

  std::shared_ptr<const Node> node_;
  nvinfer1::TensorRTPhase phase_;
  int32_t inputs_ = 0;  // of the shapes that came last
  std::vector<nvinfer1::PluginField> fields_;
  nvinfer1::PluginFieldCollection collection_{};
};

// Says it to TensorRT's logger where one was given, else to stderr.
void report(const char* message) noexcept;

// Runs `body`; what it throws is reported and becomes `failed`.
template <class Body, class Result>
Result guarded(Result failed, Body body) noexcept {
  try {
    return body();
  } catch (const std::exception& error) {
    report(error.what());
  } catch (...) {
    report("an unknown failure");
  }
  return failed;
}

}  // namespace kvlathe::trt
