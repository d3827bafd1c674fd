// The two entries by which TensorRT finds the plugin: no registry call, so one file serves every
// version from 10.3 on.
#include <cstdio>
#include <cstring>

#include "adapters/trt/plugin.h"

namespace kvlathe::trt {
namespace {

using namespace nvinfer1;

ILoggerFinder* finder = nullptr;

// Attributes of a model whose softmax is not that of its scores alone.
void refuse_scoring(const PluginFieldCollection& fields) {
  for (int32_t i = 0; i < fields.nbFields; ++i) {
    const std::string name = fields.fields[i].name;
    if (name == "softcap" || name == "sinks")
      throw Refusal(
          KVLATHE_UNSUPPORTED,
          "the model bounds its scores or has sink logits, which this plugin does not compute: "
          "build with --backend onnxruntime");
  }
}

const PluginField* field(const PluginFieldCollection& fields, const char* name,
                         PluginFieldType type) {
  for (int32_t i = 0; i < fields.nbFields; ++i) {
    const PluginField& one = fields.fields[i];
    if (std::strcmp(one.name, name)) continue;
    if (one.type != type || !one.data || one.length < 1) {
      throw Refusal(KVLATHE_BAD_ARGUMENT,
                    std::string("the attribute ") + name + " has the wrong type or no value");
    }
    return &one;
  }
  throw Refusal(KVLATHE_BAD_ARGUMENT,
                std::string("the attribute ") + name + " is missing: export the model again");
}

class Creator final : public IPluginCreatorV3One {
 public:
  Creator()
      : fields_{{"layout", nullptr, PluginFieldType::kINT32, 0},
                {"scale", nullptr, PluginFieldType::kFLOAT32, 1}} {
    collection_ = {int32_t(fields_.size()), fields_.data()};
  }
  char const* getPluginName() const noexcept override { return kName; }
  char const* getPluginVersion() const noexcept override { return kVersion; }
  char const* getPluginNamespace() const noexcept override { return kNamespace; }
  PluginFieldCollection const* getFieldNames() noexcept override { return &collection_; }

  IPluginV3* createPlugin(char const* name, PluginFieldCollection const* fields,
                          TensorRTPhase phase) noexcept override {
    return guarded<>(static_cast<IPluginV3*>(nullptr), [&]() -> IPluginV3* {
      if (!fields)
        throw Refusal(KVLATHE_BAD_ARGUMENT,
                      std::string("no attributes for ") + (name ? name : "Attend"));
      refuse_scoring(*fields);
      const PluginField& layout = *field(*fields, "layout", PluginFieldType::kINT32);
      const PluginField& scale = *field(*fields, "scale", PluginFieldType::kFLOAT32);
      const auto* table = static_cast<const int32_t*>(layout.data);
      auto node = std::make_shared<const Node>(std::vector<int32_t>(table, table + layout.length),
                                               *static_cast<const float*>(scale.data));
      return new Plugin(std::move(node), phase);
    });
  }

 private:
  std::vector<PluginField> fields_;
  PluginFieldCollection collection_{};
};

}  // namespace

void report(const char* message) noexcept {
  ILogger* logger = finder ? finder->findLogger() : nullptr;
  char line[640];
  std::snprintf(line, sizeof line, "kvlathe::Attend: %s", message);
  if (logger) {
    logger->log(ILogger::Severity::kERROR, line);
  } else {
    std::fprintf(stderr, "%s\n", line);
  }
}

}  // namespace kvlathe::trt

extern "C" KVLATHE_API void setLoggerFinder(nvinfer1::ILoggerFinder* found) {
  kvlathe::trt::finder = found;
}

extern "C" KVLATHE_API nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
  static kvlathe::trt::Creator creator;
  static nvinfer1::IPluginCreatorInterface* const creators[] = {&creator};
  count = 1;
  return creators;
}
