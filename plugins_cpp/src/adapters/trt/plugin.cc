#include "adapters/trt/plugin.h"

#include <algorithm>

namespace kvlathe::trt {
namespace {

using namespace nvinfer1;

std::vector<NodeInput> described(PluginTensorDesc const* in, int32_t inputs,
                                 void const* const* data = nullptr) {
  std::vector<NodeInput> out;
  for (int32_t i = 0; i < inputs; ++i)
    out.push_back({data ? data[i] : nullptr, in[i].dims.nbDims, in[i].dims.d});
  return out;
}

std::vector<PluginTensorDesc> largest(DynamicPluginTensorDesc const* in, int32_t inputs) {
  std::vector<PluginTensorDesc> out(inputs);
  for (int32_t i = 0; i < inputs; ++i) out[i] = in[i].desc, out[i].dims = in[i].max;
  return out;
}

}  // namespace

Plugin::Plugin(std::shared_ptr<const Node> node, TensorRTPhase phase)
    : node_(std::move(node)), phase_(phase) {
  const auto& table = node_->layer.table;
  fields_ = {{"layout", table.data(), PluginFieldType::kINT32, int32_t(table.size())},
             {"scale", &node_->scale, PluginFieldType::kFLOAT32, 1}};
  collection_ = {int32_t(fields_.size()), fields_.data()};
}

IPluginCapability* Plugin::getCapabilityInterface(PluginCapabilityType type) noexcept {
  switch (type) {
    case PluginCapabilityType::kCORE: return static_cast<IPluginV3OneCore*>(this);
    case PluginCapabilityType::kBUILD: return static_cast<IPluginV3OneBuild*>(this);
    case PluginCapabilityType::kRUNTIME: return static_cast<IPluginV3OneRuntime*>(this);
  }
  return nullptr;
}

IPluginV3* Plugin::clone() noexcept {
  return guarded<>(static_cast<IPluginV3*>(nullptr),
                   [&]() -> IPluginV3* { return new Plugin(node_, phase_); });
}

PluginFieldCollection const* Plugin::getFieldsToSerialize() noexcept { return &collection_; }

// -- build --------------------------------------------------------------------

bool Plugin::float_input(int32_t at) const {
  const Places& p = node_->places;
  return at < p.cu_seqlens_q || at == p.pool_f16 ||
         (p.proj_q >= 0 && at >= p.proj_q && at <= p.centre_k);
}

int32_t Plugin::getOutputDataTypes(DataType* types, int32_t outputs, DataType const*,
                                   int32_t) const noexcept {
  std::fill_n(types, outputs, DataType::kHALF);
  return outputs == kOutputs ? 0 : -1;
}

bool Plugin::supportsFormatCombination(int32_t at, DynamicPluginTensorDesc const* tensors,
                                       int32_t inputs, int32_t) noexcept {
  const PluginTensorDesc& one = tensors[at].desc;
  if (one.format != TensorFormat::kLINEAR) return false;
  if (at >= inputs || float_input(at)) return one.type == DataType::kHALF;
  return one.type == (at == node_->places.pool_u8 ? DataType::kINT8 : DataType::kINT32);
}

int32_t Plugin::getOutputShapes(DimsExprs const* in, int32_t inputs, DimsExprs const*, int32_t,
                                DimsExprs* out, int32_t outputs, IExprBuilder& builder) noexcept {
  return guarded(-1, [&] {
    require(inputs > node_->places.tables && outputs == kOutputs, KVLATHE_BAD_ARGUMENT,
            "the node has " + std::to_string(inputs) + " inputs: fewer than its layout names");
    const int64_t widths[] = {node_->layer.o_width, node_->layer.rows_width};
    for (int32_t i : {kO, kRows}) {
      out[i].nbDims = 2;
      out[i].d[0] = in[node_->places.q].d[0];
      out[i].d[1] = builder.constant(widths[i]);
    }
    out[kPool] = in[node_->places.pool_f16];
    return 0;
  });
}

int32_t Plugin::getAliasedInput(int32_t output) noexcept {
  return output == kPool ? node_->places.pool_f16 : -1;
}

int32_t Plugin::configurePlugin(DynamicPluginTensorDesc const* in, int32_t inputs,
                                DynamicPluginTensorDesc const*, int32_t) noexcept {
  return guarded(-1, [&] {
    node_->check(described(largest(in, inputs).data(), inputs));
    return 0;
  });
}

size_t Plugin::getWorkspaceSize(DynamicPluginTensorDesc const* in, int32_t inputs,
                                DynamicPluginTensorDesc const*, int32_t) const noexcept {
  return guarded(size_t{0}, [&] {
    return node_->workspace_anywhere(described(largest(in, inputs).data(), inputs));
  });
}

// -- run ----------------------------------------------------------------------

int32_t Plugin::onShapeChange(PluginTensorDesc const* in, int32_t inputs, PluginTensorDesc const*,
                              int32_t) noexcept {
  return guarded(-1, [&] {
    node_->check(described(in, inputs));
    inputs_ = inputs;
    return 0;
  });
}

int32_t Plugin::enqueue(PluginTensorDesc const* inDesc, PluginTensorDesc const*,
                        void const* const* in, void* const* out, void* workspace,
                        cudaStream_t stream) noexcept {
  if (phase_ == TensorRTPhase::kBUILD)
    return 0;  // only timed, on inputs that mean nothing; there is one tactic
  return guarded(-1, [&] {
    require(inputs_ > 0, KVLATHE_BAD_ARGUMENT, "enqueue came before any onShapeChange");
    const std::vector<NodeInput> inputs = described(inDesc, inputs_, in);
    node_->run(inputs, out[kO], out[kRows], workspace, node_->workspace_anywhere(inputs), stream);
    return 0;
  });
}

}  // namespace kvlathe::trt
