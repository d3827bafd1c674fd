#include "adapters/node/attend_node.h"

#include <algorithm>

#include "common/limits.h"

namespace kvlathe {
namespace {

constexpr size_t kAlign = 256;
constexpr int64_t kAttendBytes =
    16 << 20;  // what attend needs, at most, on any device: engines are built anywhere

size_t aligned(int64_t bytes) { return (size_t(bytes) + kAlign - 1) / kAlign * kAlign; }

void check(int32_t code, const kvlathe_status& status) {
  if (code) throw Refusal(kvlathe_code(code), status.message);
}

std::string shape_of(const NodeInput& input) {
  std::string text = "[";
  for (int32_t i = 0; i < input.rank; ++i) text += (i ? ", " : "") + std::to_string(input.dims[i]);
  return text + "]";
}

// Takes pieces of the workspace one after the other.
struct Cutter {
  char* next;
  template <class T>
  T* take(size_t bytes) {
    T* piece = reinterpret_cast<T*>(next);
    next += bytes;
    return piece;
  }
};

// Whether a kernel attends prompts of the layer in tiles.
bool has_tiles(const Layer& layer) {
  return std::none_of(layer.lanes.begin(), layer.lanes.end(), [](const Lane& lane) {
    return is_wide_lane(lane.rank_k, lane.rank_v, lane.values_in_keys);
  });
}

// The step's page tables as the kernels take them: those of sequences, by bucket, and those of rows,
// by part.
struct Tables {
  std::vector<const int32_t*> of_sequences;
  std::vector<int32_t*> of_rows;
  std::vector<int32_t> widths;  // by bucket
};

// The parts of a layer's attention. hidden: null, or of each row and part.
std::vector<kvlathe_part> parts_of(const Node& node, const Tables& tables, const int32_t* lengths,
                                   const int32_t* hidden) {
  std::vector<kvlathe_part> parts;
  const auto stride = int64_t(node.parts.size());
  for (int32_t i : node.attended) {
    const NodePart& part = node.parts[i];
    const Bucket& bucket = node.layer.buckets[part.bucket];
    parts.push_back({bucket.bits_k, bucket.bits_v, bucket.axis_k, bucket.axis_v, bucket.group_k,
                     bucket.group_v, part.lane_count(), tables.widths[part.bucket],
                     part.lanes.data(), bucket.page_stride, tables.of_rows[i], lengths + i, stride,
                     part.window.exact ? hidden + 2 * i : nullptr, 2 * stride});
  }
  return parts;
}

// The same by sequence, for prompt chunks.
std::vector<kvlathe_prompt_part> prompt_parts_of(const Node& node, const Tables& tables,
                                                 const int32_t* lengths) {
  std::vector<kvlathe_prompt_part> parts;
  for (int32_t i : node.attended) {
    const NodePart& part = node.parts[i];
    const int32_t s = part.bucket;
    parts.push_back({tables.of_sequences[s], lengths + s, node.layer.head.buckets, tables.widths[s],
                     s == part.window.fresh, window_among(node.parts, node.attended, part), 0});
  }
  return parts;
}

// One step of a node: its pieces of the workspace, and its calls in their order.
struct Step {
  const Node& node;
  const TableHeader& t;
  const std::vector<NodeInput>& in;
  void* const stream;
  const int32_t tokens, batch;
  const bool chunks;  // else a decode step
  const bool tiles;   // prompt chunks are attended in tiles
  const int64_t attend_bytes;
  char *queries, *attend_space;
  int32_t *sequences, *visible, *row_lengths, *hidden, *list;
  int64_t queries_width = 0;
  Tables tables;

  Step(const Node& node, const std::vector<NodeInput>& in, const Pieces& size, int64_t attend_bytes,
       char* workspace, void* stream)
      : node(node),
        t(node.layer.head),
        in(in),
        stream(stream),
        tokens(int32_t(in[node.places.q].dims[0])),
        batch(int32_t(in[node.places.lengths].dims[0])),
        chunks(in[node.places.query_offsets].dims[0] > 1),
        tiles(chunks && node.tiled),
        attend_bytes(attend_bytes) {
    Cutter cut{workspace};
    queries = cut.take<char>(size.queries);
    sequences = cut.take<int32_t>(size.sequences), visible = cut.take<int32_t>(size.visible),
    row_lengths = cut.take<int32_t>(size.row_lengths);
    hidden = size.hidden ? cut.take<int32_t>(size.hidden) : nullptr;
    attend_space = cut.take<char>(size.attend), list = cut.take<int32_t>(size.list);
    for (int32_t s = 0; s < t.buckets; ++s) {
      tables.of_sequences.push_back(ints(node.places.page_tables + s));
      tables.widths.push_back(int32_t(in[node.places.page_tables + s].dims[1]));
    }
    for (const NodePart& part : node.parts)
      tables.of_rows.push_back(
          cut.take<int32_t>(aligned(4 * int64_t{tokens} * tables.widths[part.bucket])));
    for (const Lane& lane : node.layer.lanes) queries_width += int64_t{t.group_size} * lane.rank_k;
  }

  const int32_t* ints(int32_t at) const { return static_cast<const int32_t*>(in[at].data); }
  void* pool() const { return const_cast<void*>(in[node.places.pool_f16].data); }
  int64_t pool_bytes() const {
    return 2 * in[node.places.pool_f16].dims[0] * in[node.places.pool_f16].dims[1];
  }

  void spread() const {
    uint32_t fresh = 0;
    for (int32_t s = 0; s < t.buckets; ++s)
      fresh |= uint32_t(node.layer.buckets[s].fresh != 0) << s;
    std::vector<kvlathe_window> windows;
    std::vector<int32_t> buckets;  // of the parts
    for (const NodePart& part : node.parts)
      windows.push_back(part.window), buckets.push_back(part.bucket);
    const kvlathe_spread_args args{KVLATHE_ABI_VERSION,
                                   tokens,
                                   batch,
                                   t.buckets,
                                   fresh,
                                   ints(node.places.cu_seqlens_q),
                                   ints(node.places.lengths),
                                   tables.of_sequences.data(),
                                   tables.widths.data(),
                                   sequences,
                                   visible,
                                   tables.of_rows.data(),
                                   stream,
                                   t.group_size,
                                   t.page_tokens,
                                   row_lengths,
                                   tiles ? list : nullptr,
                                   node.layer.windowed ? windows.data() : nullptr,
                                   hidden,
                                   buckets.data(),
                                   int32_t(buckets.size()),
                                   0};
    kvlathe_status status{};
    check(kvlathe_cuda_spread(&args, &status), status);
  }

  void append(void* rows) const {
    const Places& p = node.places;
    kvlathe_append_args args{};
    args.abi_version = KVLATHE_ABI_VERSION, args.element = KVLATHE_F16, args.tokens = tokens;
    args.q = in[p.q].data, args.k = in[p.k].data, args.v = in[p.v].data;
    args.q_stride = node.layer.q_width, args.k_stride = node.layer.k_width,
    args.v_stride = node.layer.v_width;
    if (t.rope) args.cos = in[p.cos].data, args.sin = in[p.sin].data;
    args.sequence_of = sequences, args.visible = visible;
    args.page_tables = tables.of_sequences.data(), args.page_table_widths = tables.widths.data();
    args.layout = static_cast<const int32_t*>(in.back().data);
    if (t.projected)
      args.proj_q = in[p.proj_q].data, args.proj_k = in[p.proj_k].data,
      args.centre_k = in[p.centre_k].data;
    args.pool = pool(), args.pool_bytes = pool_bytes();
    args.q_out = queries, args.q_out_stride = queries_width;
    args.rows = rows, args.stream = stream;
    kvlathe_status status{};
    check(kvlathe_cuda_append(&node.layer, &args, &status), status);
  }

  void attend(void* o) const {
    const std::vector<kvlathe_part> parts =
        parts_of(node, tables, tiles || node.layer.windowed ? row_lengths : visible, hidden);
    const std::vector<kvlathe_prompt_part> prompt_parts =
        prompt_parts_of(node, tables, ints(node.places.lengths));
    // What sequences have is on the device: whether all rows are chunks' is not known here.
    const kvlathe_prompts prompts{
        list,   ints(node.places.cu_seqlens_q), batch, tokens, prompt_parts.data(), nullptr, 0,
        nullptr};
    // The kernel before is append: it writes neither lengths nor page tables, and in a decode step
    // one row a sequence. Other rows read what it writes for the rows before them.
    const int32_t flags = KVLATHE_OVERLAP | (chunks ? 0 : KVLATHE_APPENDED);
    const kvlathe_attend_decode_args args{KVLATHE_ABI_VERSION,
                                          KVLATHE_F16,
                                          tokens,
                                          t.group_size,
                                          t.page_tokens,
                                          int32_t(parts.size()),
                                          node.scale,
                                          flags,
                                          parts.data(),
                                          pool(),
                                          pool_bytes(),
                                          queries,
                                          queries_width,
                                          o,
                                          node.layer.o_width,
                                          attend_space,
                                          attend_bytes,
                                          stream,
                                          tiles ? &prompts : nullptr,
                                          nullptr,
                                          0,
                                          nullptr,
                                          0.f,
                                          0};
    kvlathe_status status{};
    check(kvlathe_cuda_attend_decode(&args, &status), status);
  }
};

}  // namespace

Places::Places(const TableHeader& t) {
  int32_t next = 0;
  const auto take = [&](bool there) { return there ? next++ : -1; };
  q = take(true), k = take(true), v = take(true), cos = take(t.rope), sin = take(t.rope);
  cu_seqlens_q = take(true), query_offsets = take(true), lengths = take(true);
  page_tables = next, next += t.buckets;
  take(t.pools & kPoolF32);
  pool_f16 = take(t.pools & kPoolF16), pool_u8 = take(t.pools & kPoolU8);
  proj_q = take(t.projected), proj_k = take(t.projected), centre_k = take(t.projected);
  tables = next;
}

Node::Node(std::vector<int32_t> table, float scale)
    : layer(std::move(table)),
      places(layer.head),
      parts(node_parts(layer)),
      attended(attended_parts(parts)),
      scale(scale),
      tiled(has_tiles(layer)) {
  const TableHeader& t = layer.head;
  require(is_half(t.hot_bits) && !(t.pools & kPoolF32), KVLATHE_UNSUPPORTED,
          "the kernels compute in 16 bit and this plan has 32-bit pages: build with --dtype "
          "float16 --kv-bits 16");
  check_bucket_count(int64_t(parts.size()));
  check_lane_count(t.lanes);
}

void Node::check(const std::vector<NodeInput>& in) const {
  const Places& p = places;
  require(int32_t(in.size()) > p.tables, KVLATHE_BAD_ARGUMENT,
          "the node has " + std::to_string(in.size()) + " inputs: fewer than its layout names");
  const int64_t tokens = in[p.q].dims[0], batch = in[p.lengths].dims[0];
  const auto want = [&](const char* name, int32_t at, std::vector<int64_t> wanted) {
    bool ok = in[at].rank == int32_t(wanted.size());
    for (int32_t i = 0; ok && i < in[at].rank; ++i)
      ok = wanted[i] < 0 || in[at].dims[i] == wanted[i];
    require(ok, KVLATHE_BAD_ARGUMENT,
            std::string(name) + " has the shape " + shape_of(in[at]) +
                ", which contradicts the layout of layer " + std::to_string(layer.head.layer));
  };
  want("q", p.q, {tokens, layer.q_width}), want("k", p.k, {tokens, layer.k_width}),
      want("v", p.v, {tokens, layer.v_width});
  if (p.cos >= 0)
    want("cos", p.cos, {tokens, layer.head.planes}),
        want("sin", p.sin, {tokens, layer.head.planes});
  want("cu_seqlens_q", p.cu_seqlens_q, {batch + 1}),
      want("lengths", p.lengths, {batch, layer.head.buckets});
  for (int32_t s = 0; s < layer.head.buckets; ++s)
    want("a page table", p.page_tables + s, {batch, -1});
  want("the pool", p.pool_f16, {-1, -1});
  if (p.proj_q < 0) return;
  want("proj_q", p.proj_q, {layer.head.lanes, layer.head.input_dim, layer.head.rank_k});
  want("proj_k", p.proj_k, {layer.head.lanes, layer.head.input_dim, layer.head.rank_k});
  want("centre_k", p.centre_k, {layer.head.lanes, layer.head.rank_k});
}

Pieces Node::pieces(const std::vector<NodeInput>& in, int64_t attend) const {
  const int64_t tokens = in[places.q].dims[0], batch = in[places.lengths].dims[0];
  int64_t rank_k = 0, pages = 0;
  for (const Lane& lane : layer.lanes) rank_k += lane.rank_k;
  bool exact = false;
  for (const NodePart& part : parts) {
    pages += aligned(4 * tokens * in[places.page_tables + part.bucket].dims[1]);
    exact |= part.window.exact != 0;
  }
  const auto count = int64_t(parts.size());
  return {aligned(2 * tokens * rank_k * layer.head.group_size),
          aligned(4 * tokens),
          aligned(4 * tokens * layer.head.buckets),
          aligned(4 * tokens * count),
          exact ? aligned(8 * tokens * count) : 0,
          size_t(pages),
          aligned(attend),
          aligned(kvlathe_cuda_prompt_list_bytes(int32_t(tokens), int32_t(batch),
                                                 layer.head.group_size))};
}

// The least, which is enough for all: the memory is cleared on each call, and warps that attend alone
// would use several times as much.
int64_t Node::attend_bytes() const {
  kvlathe_status status{};
  int64_t bytes = 0;
  kvlathe::check(kvlathe_cuda_workspace_bytes(0, layer.head.lanes, &bytes, &status), status);
  return bytes;
}

size_t Node::workspace_bytes(const std::vector<NodeInput>& in) const {
  return pieces(in, attend_bytes()).bytes();
}

size_t Node::workspace_anywhere(const std::vector<NodeInput>& in) const {
  return pieces(in, kAttendBytes).bytes();
}

void Node::run(const std::vector<NodeInput>& in, void* o, void* rows, void* workspace, size_t lent,
               void* stream) const {
  if (in[places.q].dims[0] == 0) return;
  const int64_t attend = attend_bytes();
  const Pieces size = pieces(in, attend);
  require(size.bytes() <= lent, KVLATHE_TOO_SMALL,
          "this device needs more workspace than the engine holds");
  const Step step(*this, in, size, attend, static_cast<char*>(workspace), stream);
  device_clear(step.attend_space, size.attend, stream);
  step.spread();
  step.append(rows);
  step.attend(o);
}

}  // namespace kvlathe
