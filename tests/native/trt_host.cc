// A host for the plugin library: it does what TensorRT does with one Attend
// node, in TensorRT's order, through the plugin ABI. Compiled against NvInfer.h
// alone; nothing of TensorRT is linked. Used by test_trt_plugin.py through
// ctypes.
#include <NvInfer.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using namespace nvinfer1;

struct Tensor {
  int32_t type; // DataType
  int32_t rank;
  int64_t dims[8], most[8]; // of this step; of the profile
  void *data;
};

struct Job {
  const char *library;
  const char *layer;
  const int32_t *layout;
  int32_t layout_count;
  float scale;
  int32_t inputs;
  Tensor *in;
  Tensor out[3];           // rank and dims are filled in; data is given
  int32_t aliased[3];      // filled in
  int64_t workspace_bytes; // filled in
  void *workspace;         // null: stop before enqueue
  void *stream;
  char said[1024]; // what the plugin told the logger, or why this host stopped
};

void want(bool ok, const char *what) {
  if (!ok)
    throw std::runtime_error(std::string("host: ") + what);
}

// -- what TensorRT offers to a plugin
// ------------------------------------------------------------------------------------

class Logger final : public ILogger {
public:
  void log(Severity, char const *message) noexcept override { last = message; }
  std::string last;
};

Logger logger;

class Finder final : public ILoggerFinder {
public:
  ILogger *findLogger() noexcept override { return &logger; }
};

// A dimension: its value in this step, which a plugin may only read where it is
// constant.
class Dimension final : public IDimensionExpr, public apiv::VDimensionExpr {
public:
  Dimension(int64_t value, bool constant) : value(value), constant(constant) {
    mImpl = this;
  }
  bool isConstant() const override { return constant; }
  int64_t getConstantValue() const override {
    return constant ? value : INT64_MIN;
  }
  bool isSizeTensor() const override { return false; }
  int64_t value;
  bool constant;
};

class Builder final : public IExprBuilder, public apiv::VExprBuilder {
public:
  Builder() { mImpl = this; }
  IDimensionExpr const *constant(int64_t value) override {
    return make(value, true);
  }
  IDimensionExpr const *operation(DimensionOperation, IDimensionExpr const &,
                                  IDimensionExpr const &) override {
    throw std::runtime_error(
        "host: the plugin computes with dimensions, which this host cannot");
  }
  IDimensionExpr const *declareSizeTensor(int32_t, IDimensionExpr const &,
                                          IDimensionExpr const &) override {
    return nullptr;
  }
  const Dimension *make(int64_t value, bool constant) {
    owned.push_back(std::make_unique<Dimension>(value, constant));
    return owned.back().get();
  }
  std::vector<std::unique_ptr<Dimension>> owned;
};

// -- the steps
// -------------------------------------------------------------------------------------------------------------

IPluginCreatorV3One *creator_of(const char *path) {
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library)
    throw std::runtime_error(dlerror());
  using Creators = IPluginCreatorInterface *const *(*)(int32_t &);
  using SetFinder = void (*)(ILoggerFinder *);
  const auto creators =
      reinterpret_cast<Creators>(dlsym(library, "getCreators"));
  const auto set_finder =
      reinterpret_cast<SetFinder>(dlsym(library, "setLoggerFinder"));
  want(creators && set_finder,
       "the library lacks getCreators or setLoggerFinder");
  static Finder finder;
  set_finder(&finder);
  int32_t count = 0;
  IPluginCreatorInterface *const *all = creators(count);
  want(count == 1, "there is not one creator");
  const InterfaceInfo info = all[0]->getInterfaceInfo();
  want(!std::strcmp(info.kind, "PLUGIN CREATOR_V3ONE") && info.major == 1,
       "the creator is not IPluginCreatorV3One");
  auto *creator = static_cast<IPluginCreatorV3One *>(all[0]);
  want(!std::strcmp(creator->getPluginName(), "Attend") &&
           !std::strcmp(creator->getPluginVersion(), "1") &&
           !std::strcmp(creator->getPluginNamespace(), "kvlathe"),
       "the creator is not kvlathe::Attend, version 1");
  return creator;
}

// The parser offers every attribute of the node that the creator names, and no
// other.
std::vector<PluginField> fields_of(IPluginCreatorV3One *creator,
                                   const Job &job) {
  const PluginField offered[] = {
      {"layout", job.layout, PluginFieldType::kINT32, job.layout_count},
      {"scale", &job.scale, PluginFieldType::kFLOAT32, 1}};
  const PluginFieldCollection *names = creator->getFieldNames();
  std::vector<PluginField> fields;
  for (int32_t i = 0; i < names->nbFields; ++i) {
    for (const PluginField &field : offered) {
      if (!std::strcmp(field.name, names->fields[i].name)) {
        want(field.type == names->fields[i].type,
             "the creator names a field of another type");
        fields.push_back(field);
      }
    }
  }
  return fields;
}

template <class Capability>
Capability *capability(IPluginV3 *plugin, PluginCapabilityType type,
                       const char *kind) {
  IPluginCapability *found = plugin->getCapabilityInterface(type);
  want(found && !std::strcmp(found->getInterfaceInfo().kind, kind),
       "a capability is missing");
  return static_cast<Capability *>(found);
}

Dims dims_of(int32_t rank, const int64_t *values) {
  Dims dims{};
  dims.nbDims = rank;
  std::copy_n(values, rank, dims.d);
  return dims;
}

PluginTensorDesc described(const Tensor &tensor, bool most = false) {
  return {dims_of(tensor.rank, most ? tensor.most : tensor.dims),
          DataType(tensor.type), TensorFormat::kLINEAR, 1.f};
}

void infer_outputs(IPluginV3OneBuild *build, Job &job) {
  want(build->getNbOutputs() == 3, "there are not three outputs");
  std::vector<DataType> types;
  for (int32_t i = 0; i < job.inputs; ++i)
    types.push_back(DataType(job.in[i].type));
  DataType outs[3];
  want(!build->getOutputDataTypes(outs, 3, types.data(), job.inputs),
       "getOutputDataTypes failed");
  Builder builder;
  std::vector<DimsExprs> in(job.inputs);
  for (int32_t i = 0; i < job.inputs; ++i) {
    in[i].nbDims = job.in[i].rank;
    for (int32_t d = 0; d < job.in[i].rank; ++d)
      in[i].d[d] = builder.make(job.in[i].dims[d],
                                job.in[i].dims[d] == job.in[i].most[d]);
  }
  DimsExprs out[3]{};
  want(!build->getOutputShapes(in.data(), job.inputs, nullptr, 0, out, 3,
                               builder),
       "getOutputShapes failed");
  for (int32_t i = 0; i < 3; ++i) {
    job.out[i].type = int32_t(outs[i]);
    job.out[i].rank = out[i].nbDims;
    for (int32_t d = 0; d < out[i].nbDims; ++d) {
      job.out[i].dims[d] = job.out[i].most[d] =
          static_cast<const Dimension *>(out[i].d[d])->value;
    }
  }
}

void choose_formats(IPluginV3OneBuild *build, const Job &job) {
  std::vector<DynamicPluginTensorDesc> tensors(job.inputs + 3);
  for (int32_t i = 0; i < job.inputs + 3; ++i) {
    const Tensor &tensor = i < job.inputs ? job.in[i] : job.out[i - job.inputs];
    tensors[i] = {described(tensor),
                  dims_of(tensor.rank, tensor.dims),
                  dims_of(tensor.rank, tensor.most),
                  {}};
  }
  for (int32_t i = 0; i < job.inputs + 3; ++i) {
    const std::string what =
        "the plugin takes no linear tensor of the right type at " +
        std::to_string(i);
    want(build->supportsFormatCombination(i, tensors.data(), job.inputs, 3),
         what.c_str());
    DynamicPluginTensorDesc kept = tensors[i];
    tensors[i].desc.type = DataType::kFLOAT;
    want(!build->supportsFormatCombination(i, tensors.data(), job.inputs, 3),
         "the plugin takes float32");
    tensors[i] = kept;
    tensors[i].desc.format = TensorFormat::kCHW32;
    want(!build->supportsFormatCombination(i, tensors.data(), job.inputs, 3),
         "the plugin takes another format than linear");
    tensors[i] = kept;
  }
  want(!build->configurePlugin(tensors.data(), job.inputs,
                               tensors.data() + job.inputs, 3),
       "configurePlugin failed");
  const_cast<Job &>(job).workspace_bytes = int64_t(build->getWorkspaceSize(
      tensors.data(), job.inputs, tensors.data() + job.inputs, 3));
}

// Fields as they lie in an engine: copies, whose originals are gone.
struct Serialized {
  explicit Serialized(const PluginFieldCollection &from) {
    for (int32_t i = 0; i < from.nbFields; ++i) {
      const auto *data = static_cast<const char *>(from.fields[i].data);
      names.push_back(std::make_unique<std::string>(from.fields[i].name));
      bytes.push_back(std::make_unique<std::vector<char>>(
          data, data + 4 * from.fields[i].length));
      fields.emplace_back(names.back()->c_str(), bytes.back()->data(),
                          from.fields[i].type, from.fields[i].length);
    }
  }
  std::vector<std::unique_ptr<std::string>> names;
  std::vector<std::unique_ptr<std::vector<char>>> bytes;
  std::vector<PluginField> fields;
};

void execute(IPluginV3 *plugin, Job &job) {
  auto *runtime = capability<IPluginV3OneRuntime>(
      plugin, PluginCapabilityType::kRUNTIME, "PLUGIN_V3ONE_RUNTIME");
  std::vector<PluginTensorDesc> in, out;
  std::vector<const void *> from;
  std::vector<void *> to;
  for (int32_t i = 0; i < job.inputs; ++i)
    in.push_back(described(job.in[i])), from.push_back(job.in[i].data);
  for (Tensor &tensor : job.out)
    out.push_back(described(tensor)), to.push_back(tensor.data);
  want(!runtime->onShapeChange(in.data(), job.inputs, out.data(), 3),
       "onShapeChange failed");
  if (!job.workspace)
    return;
  want(!runtime->enqueue(in.data(), out.data(), from.data(), to.data(),
                         job.workspace, static_cast<cudaStream_t>(job.stream)),
       "enqueue failed");
}

void drive(Job &job) {
  IPluginCreatorV3One *creator = creator_of(job.library);
  const std::vector<PluginField> fields = fields_of(creator, job);
  const PluginFieldCollection collection{int32_t(fields.size()), fields.data()};
  std::unique_ptr<IPluginV3> parsed(
      creator->createPlugin(job.layer, &collection, TensorRTPhase::kBUILD));
  want(parsed != nullptr, "createPlugin failed");
  std::unique_ptr<IPluginV3> plugin(parsed->clone());
  want(plugin != nullptr, "clone failed");
  parsed.reset();
  auto *core = capability<IPluginV3OneCore>(
      plugin.get(), PluginCapabilityType::kCORE, "PLUGIN_V3ONE_CORE");
  want(!std::strcmp(core->getPluginName(), "Attend") &&
           !std::strcmp(core->getPluginNamespace(), "kvlathe"),
       "the plugin is not kvlathe::Attend");
  auto *build = capability<IPluginV3OneBuildV2>(
      plugin.get(), PluginCapabilityType::kBUILD, "PLUGIN_V3ONE_BUILD");
  want(build->getInterfaceInfo().major == 2,
       "the build capability has no aliasing");
  infer_outputs(build, job);
  for (int32_t i = 0; i < 3; ++i)
    job.aliased[i] = build->getAliasedInput(i);
  choose_formats(build, job);
  auto *runtime = capability<IPluginV3OneRuntime>(
      plugin.get(), PluginCapabilityType::kRUNTIME, "PLUGIN_V3ONE_RUNTIME");
  const Serialized engine(*runtime->getFieldsToSerialize());
  plugin.reset();

  const PluginFieldCollection stored{int32_t(engine.fields.size()),
                                     engine.fields.data()};
  std::unique_ptr<IPluginV3> loaded(
      creator->createPlugin(job.layer, &stored, TensorRTPhase::kRUNTIME));
  want(loaded != nullptr, "createPlugin failed on the serialized fields");
  auto *resident = capability<IPluginV3OneRuntime>(
      loaded.get(), PluginCapabilityType::kRUNTIME, "PLUGIN_V3ONE_RUNTIME");
  std::unique_ptr<IPluginV3> context(resident->attachToContext(nullptr));
  want(context != nullptr && context != loaded, "attachToContext gave no copy");
  execute(context.get(), job);
}

} // namespace

// 0, or 1 with the reason in job->said.
extern "C" int32_t drive_plugin(Job *job) {
  logger.last.clear();
  int32_t failed = 0;
  std::string said;
  try {
    drive(*job);
  } catch (const std::exception &error) {
    failed = 1, said = error.what();
  }
  std::snprintf(job->said, sizeof job->said, "%s%s%s", logger.last.c_str(),
                said.empty() ? "" : " | ", said.c_str());
  return failed;
}
