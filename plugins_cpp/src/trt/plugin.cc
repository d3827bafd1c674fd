#include "plugin.h"

#include <cuda_runtime_api.h>

#include <algorithm>

namespace kvlathe::trt {
namespace {

using namespace nvinfer1;

constexpr size_t kAlign = 256;
constexpr int64_t kAttendBytes = 16 << 20;  // for what attend needs beyond its counters, on any device: engines are built anywhere

size_t aligned(int64_t bytes) { return (size_t(bytes) + kAlign - 1) / kAlign * kAlign; }

void require(bool ok, const std::string& message, kvlathe_code code = KVLATHE_BAD_ARGUMENT) {
  if (!ok) throw Refusal(code, message);
}

void check(int32_t code, const kvlathe_status& status) {
  if (code) throw Refusal(kvlathe_code(code), status.message);
}

void check_runs(const Layer& layer) {
  const TableHeader& t = layer.head;
  require(t.hot_bits == 16 && !(t.pools & 1), "the plugin computes in 16 bit and this plan has 32-bit pages: build with --dtype float16 --kv_bits 16",
          KVLATHE_UNSUPPORTED);
  require(t.buckets <= KVLATHE_MAX_PARTS, "the plan has more than 3 buckets", KVLATHE_UNSUPPORTED);
  require(t.lanes <= KVLATHE_MAX_HEADS, "the layer has more than 64 lanes", KVLATHE_UNSUPPORTED);
}

std::string shape_of(const Dims& dims) {
  std::string text = "[";
  for (int32_t i = 0; i < dims.nbDims; ++i) text += (i ? ", " : "") + std::to_string(dims.d[i]);
  return text + "]";
}

}  // namespace

Places::Places(const TableHeader& t) {
  int32_t next = 0;
  const auto take = [&](bool there) { return there ? next++ : -1; };
  q = take(true), k = take(true), v = take(true), cos = take(t.rope), sin = take(t.rope);
  query_starts = take(true), query_offsets = take(true), lengths = take(true);
  page_tables = next, next += t.buckets;
  take(t.pools & 1);
  pool_f16 = take(t.pools & 2), pool_u8 = take(t.pools & 4);
  proj_q = take(t.projected), proj_k = take(t.projected), centre_k = take(t.projected);
  tables = next;
}

Plugin::Plugin(std::shared_ptr<const Form> form, TensorRTPhase phase) : form_(std::move(form)), phase_(phase) {
  check_runs(form_->layer);
  const auto& table = form_->layer.table;
  fields_ = {{"layout", table.data(), PluginFieldType::kINT32, int32_t(table.size())}, {"scale", &form_->scale, PluginFieldType::kFLOAT32, 1}};
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
  return guarded<>(static_cast<IPluginV3*>(nullptr), [&]() -> IPluginV3* { return new Plugin(form_, phase_); });
}

PluginFieldCollection const* Plugin::getFieldsToSerialize() noexcept { return &collection_; }

// -- build ----------------------------------------------------------------------------------------------------------------

bool Plugin::float_input(int32_t at) const {
  const Places& p = form_->places;
  return at < p.query_starts || at == p.pool_f16 || (p.proj_q >= 0 && at >= p.proj_q && at <= p.centre_k);
}

int32_t Plugin::getOutputDataTypes(DataType* types, int32_t outputs, DataType const*, int32_t) const noexcept {
  std::fill_n(types, outputs, DataType::kHALF);
  return outputs == kOutputs ? 0 : -1;
}

bool Plugin::supportsFormatCombination(int32_t at, DynamicPluginTensorDesc const* tensors, int32_t inputs, int32_t) noexcept {
  const PluginTensorDesc& one = tensors[at].desc;
  if (one.format != TensorFormat::kLINEAR) return false;
  if (at >= inputs || float_input(at)) return one.type == DataType::kHALF;
  return one.type == (at == form_->places.pool_u8 ? DataType::kINT8 : DataType::kINT32);
}

int32_t Plugin::getOutputShapes(DimsExprs const* in, int32_t inputs, DimsExprs const*, int32_t, DimsExprs* out, int32_t outputs,
                                IExprBuilder& builder) noexcept {
  return guarded(-1, [&] {
    require(inputs > form_->places.tables && outputs == kOutputs, "the node has " + std::to_string(inputs) + " inputs: fewer than its layout names");
    const int64_t widths[] = {form_->layer.o_width, form_->layer.rows_width};
    for (int32_t i : {kO, kRows}) {
      out[i].nbDims = 2;
      out[i].d[0] = in[form_->places.q].d[0];
      out[i].d[1] = builder.constant(widths[i]);
    }
    out[kPool] = in[form_->places.pool_f16];
    return 0;
  });
}

int32_t Plugin::getAliasedInput(int32_t output) noexcept { return output == kPool ? form_->places.pool_f16 : -1; }

int32_t Plugin::configurePlugin(DynamicPluginTensorDesc const* in, int32_t inputs, DynamicPluginTensorDesc const*, int32_t) noexcept {
  return guarded(-1, [&] {
    std::vector<PluginTensorDesc> largest(inputs);
    for (int32_t i = 0; i < inputs; ++i) largest[i] = in[i].desc, largest[i].dims = in[i].max;
    check_shapes(largest.data(), inputs);
    return 0;
  });
}

Pieces Plugin::pieces(int64_t tokens, int64_t batch, const std::vector<int64_t>& widths, int64_t attend) const {
  int64_t rank_k = 0, pages = 0;
  for (const Lane& lane : form_->layer.lanes) rank_k += lane.rank_k;
  for (int64_t width : widths) pages += aligned(4 * tokens * width);
  return {aligned(2 * tokens * rank_k * form_->layer.head.group_size), aligned(4 * tokens),
          aligned(4 * tokens * form_->layer.head.buckets), size_t(pages), aligned(attend),
          aligned(kvlathe_cuda_prompt_list_bytes(int32_t(tokens), int32_t(batch), form_->layer.head.group_size))};
}

size_t Plugin::getWorkspaceSize(DynamicPluginTensorDesc const* in, int32_t, DynamicPluginTensorDesc const*, int32_t) const noexcept {
  return guarded(size_t{0}, [&] {
    const int64_t tokens = in[form_->places.q].max.d[0];
    std::vector<int64_t> widths;
    for (int32_t s = 0; s < form_->layer.head.buckets; ++s) widths.push_back(in[form_->places.page_tables + s].max.d[1]);
    return pieces(tokens, in[form_->places.lengths].max.d[0], widths, kAttendBytes + 4 * tokens * form_->layer.head.lanes).bytes();
  });
}

// -- run ------------------------------------------------------------------------------------------------------------------

void Plugin::check_shapes(PluginTensorDesc const* in, int32_t inputs) const {
  const Places& p = form_->places;
  const Layer& layer = form_->layer;
  require(inputs > p.tables, "the node has " + std::to_string(inputs) + " inputs: fewer than its layout names");
  const int64_t tokens = in[p.q].dims.d[0], batch = in[p.lengths].dims.d[0];
  const auto want = [&](const char* name, int32_t at, std::vector<int64_t> wanted) {
    const Dims& dims = in[at].dims;
    bool ok = dims.nbDims == int32_t(wanted.size());
    for (int32_t i = 0; ok && i < dims.nbDims; ++i) ok = wanted[i] < 0 || dims.d[i] == wanted[i];
    require(ok, std::string(name) + " has the shape " + shape_of(dims) + ", which contradicts the layout of layer " + std::to_string(layer.head.layer));
  };
  want("q", p.q, {tokens, layer.q_width}), want("k", p.k, {tokens, layer.k_width}), want("v", p.v, {tokens, layer.v_width});
  if (p.cos >= 0) want("cos", p.cos, {tokens, layer.head.planes}), want("sin", p.sin, {tokens, layer.head.planes});
  want("query_starts", p.query_starts, {batch + 1}), want("lengths", p.lengths, {batch, layer.head.buckets});
  for (int32_t s = 0; s < layer.head.buckets; ++s) want("a page table", p.page_tables + s, {batch, -1});
  want("the pool", p.pool_f16, {-1, -1});
  if (p.proj_q < 0) return;
  want("proj_q", p.proj_q, {layer.head.lanes, layer.head.input_dim, layer.head.rank_k});
  want("proj_k", p.proj_k, {layer.head.lanes, layer.head.input_dim, layer.head.rank_k});
  want("centre_k", p.centre_k, {layer.head.lanes, layer.head.rank_k});
}

int32_t Plugin::onShapeChange(PluginTensorDesc const* in, int32_t inputs, PluginTensorDesc const*, int32_t) noexcept {
  return guarded(-1, [&] {
    check_shapes(in, inputs);
    layout_at_ = inputs - 1;
    return 0;
  });
}

int32_t Plugin::enqueue(PluginTensorDesc const* inDesc, PluginTensorDesc const*, void const* const* in, void* const* out, void* workspace,
                        cudaStream_t stream) noexcept {
  if (phase_ == TensorRTPhase::kBUILD) return 0;  // only timed, on inputs that mean nothing; there is one tactic
  return guarded(-1, [&] {
    require(layout_at_ >= 0, "enqueue came before any onShapeChange");
    run(inDesc, in, out, static_cast<char*>(workspace), stream);
    return 0;
  });
}

// The parts of a layer's attention: one for each bucket that holds lanes of it.
static std::vector<kvlathe_part> parts_of(const Layer& layer, const std::vector<const int32_t*>& tables, const std::vector<int32_t>& widths,
                                          const int32_t* visible) {
  std::vector<kvlathe_part> parts;
  for (int32_t s = 0; s < layer.head.buckets; ++s) {
    const Bucket& bucket = layer.buckets[s];
    if (!bucket.lane_count) continue;
    parts.push_back({bucket.bits_k, bucket.bits_v, bucket.axis_k, bucket.axis_v, bucket.group_k, bucket.group_v, bucket.lane_count, widths[s],
                     layer.table.data() + bucket.lanes_at, bucket.page_stride, tables[s], visible + s, layer.head.buckets});
  }
  return parts;
}

// The same buckets by sequence, for prompt chunks.
static std::vector<kvlathe_prompt_part> prompt_parts_of(const Layer& layer, const std::vector<const int32_t*>& tables,
                                                        const std::vector<int32_t>& widths, const int32_t* lengths) {
  std::vector<kvlathe_prompt_part> parts;
  for (int32_t s = 0; s < layer.head.buckets; ++s) {
    if (layer.buckets[s].lane_count) parts.push_back({tables[s], lengths + s, layer.head.buckets, widths[s], layer.buckets[s].fresh != 0});
  }
  return parts;
}

void Plugin::run(PluginTensorDesc const* desc, void const* const* in, void* const* out, char* workspace, cudaStream_t stream) const {
  const Layer& layer = form_->layer;
  const TableHeader& t = layer.head;
  const Places& p = form_->places;
  kvlathe_status status{};
  const int32_t tokens = int32_t(desc[p.q].dims.d[0]), batch = int32_t(desc[p.lengths].dims.d[0]);
  if (tokens == 0) return;
  const auto ints = [&](int32_t at) { return static_cast<const int32_t*>(in[at]); };
  std::vector<const int32_t*> tables;
  std::vector<int32_t> widths;
  for (int32_t s = 0; s < t.buckets; ++s) tables.push_back(ints(p.page_tables + s)), widths.push_back(int32_t(desc[p.page_tables + s].dims.d[1]));
  int64_t attend_bytes = 0;
  check(kvlathe_cuda_workspace_bytes(tokens, t.lanes, &attend_bytes, &status), status);
  require(attend_bytes <= kAttendBytes + 4 * int64_t{tokens} * t.lanes, "this device needs more workspace than the engine holds", KVLATHE_TOO_SMALL);

  const Pieces size = pieces(tokens, batch, {widths.begin(), widths.end()}, attend_bytes);
  char *queries = workspace, *sequences = queries + size.queries, *visible = sequences + size.sequences, *spread = visible + size.visible,
       *attend = spread + size.tables;
  const int64_t list_bytes = kvlathe_cuda_prompt_list_bytes(tokens, batch, t.group_size);
  const bool chunks = desc[p.query_offsets].dims.d[0] > 1;  // else a decode step
  int32_t *list = reinterpret_cast<int32_t*>(attend + aligned(attend_bytes)), *row_lengths = list + aligned(list_bytes) / 4;
  std::vector<int32_t*> spread_tables;
  for (int32_t s = 0; s < t.buckets; ++s) {
    spread_tables.push_back(reinterpret_cast<int32_t*>(spread));
    spread += aligned(4 * int64_t{tokens} * widths[s]);
  }

  uint32_t fresh = 0, quantized = 0;
  for (int32_t s = 0; s < t.buckets; ++s) {
    fresh |= uint32_t(layer.buckets[s].fresh != 0) << s;
    quantized |= uint32_t(std::min(layer.buckets[s].bits_k, layer.buckets[s].bits_v) < 16) << s;
  }
  kvlathe_spread_args step{KVLATHE_ABI_VERSION, tokens, batch, t.buckets, fresh, quantized, ints(p.query_starts), ints(p.lengths), tables.data(),
                           widths.data(), reinterpret_cast<int32_t*>(sequences), reinterpret_cast<int32_t*>(visible), spread_tables.data(), stream,
                           t.group_size, 0, row_lengths, chunks ? list : nullptr};
  check(kvlathe_cuda_spread(&step, &status), status);

  const int64_t pool_bytes = 2 * desc[p.pool_f16].dims.d[0] * desc[p.pool_f16].dims.d[1];
  kvlathe_append_args append{};
  append.abi_version = KVLATHE_ABI_VERSION, append.element = KVLATHE_F16, append.tokens = tokens;
  append.q = in[p.q], append.k = in[p.k], append.v = in[p.v];
  append.q_stride = layer.q_width, append.k_stride = layer.k_width, append.v_stride = layer.v_width;
  if (t.rope) append.cos = in[p.cos], append.sin = in[p.sin];
  append.sequence_of = step.sequence_of, append.visible = step.visible;
  append.page_tables = tables.data(), append.page_table_widths = widths.data();
  append.layout = ints(layout_at_);
  if (t.projected) append.proj_q = in[p.proj_q], append.proj_k = in[p.proj_k], append.centre_k = in[p.centre_k];
  append.pool = const_cast<void*>(in[p.pool_f16]), append.pool_bytes = pool_bytes;
  append.q_out = queries;
  for (const Lane& lane : layer.lanes) append.q_out_stride += int64_t{t.group_size} * lane.rank_k;
  append.rows = out[kRows], append.stream = stream;
  check(kvlathe_cuda_append(&form_->layer, &append, &status), status);

  const std::vector<const int32_t*> rows(spread_tables.begin(), spread_tables.end());
  const std::vector<kvlathe_part> parts = parts_of(layer, rows, widths, chunks ? row_lengths : step.visible);
  const std::vector<kvlathe_prompt_part> prompt_parts = prompt_parts_of(layer, tables, widths, ints(p.lengths));
  const kvlathe_prompts prompts{list, ints(p.query_starts), batch, 0, prompt_parts.data()};  // what sequences have is on the device
  require(cudaMemsetAsync(attend, 0, attend_bytes, stream) == cudaSuccess, "clearing the workspace failed", KVLATHE_DEVICE_ERROR);
  kvlathe_attend_decode_args decode{KVLATHE_ABI_VERSION, KVLATHE_F16, tokens, t.group_size, t.page_tokens, int32_t(parts.size()), form_->scale, 0,
                                    parts.data(), append.pool, pool_bytes, queries, append.q_out_stride, out[kO], layer.o_width, attend, attend_bytes, stream,
                                    chunks ? &prompts : nullptr};
  check(kvlathe_cuda_attend_decode(&decode, &status), status);
}

}  // namespace kvlathe::trt
