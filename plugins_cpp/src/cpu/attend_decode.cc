// The portable reference of attend_decode: every format, no vector code. What the fast kernels are
// tested against.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "common/decode_call.h"
#include "common/float8.h"
#include "cpu/numbers.h"

namespace kvlathe {
namespace {

float load(const void* base, int64_t index, int32_t element) {
  if (element == KVLATHE_F32) return static_cast<const float*>(base)[index];
  const uint16_t raw = static_cast<const uint16_t*>(base)[index];
  return element == KVLATHE_F16 ? float_of_half(raw) : float_of_bfloat(raw);
}

void store(void* base, int64_t index, int32_t element, float value) {
  if (element == KVLATHE_F32) {
    static_cast<float*>(base)[index] = value;
  } else {
    static_cast<uint16_t*>(base)[index] =
        element == KVLATHE_F16 ? half_of_float(value) : bfloat_of_float(value);
  }
}

// Code number `index` of a row of `count`: low bits first, or in blocks of three runs.
uint32_t packed_code(const uint8_t* row, int64_t index, int64_t count, int bits) {
  const int64_t together = codes_together(bits), place = index % together;
  if (!in_blocks(bits)) return row[index / together] >> (place * bits) & uint32_t(levels_of(bits));
  const Threes block = threes_at(index, count);
  const uint8_t* byte = row + block.at;
  if (place < 6) return byte[place / 2 * block.run] >> (place % 2 * 3) & 7u;
  return uint32_t(byte[(place - 6) * block.run] >> 6) | (byte[2 * block.run] >> place & 1u) << 2;
}

// One lane's K or V in one page: where it lies and how it is read.
struct Slab {
  const uint8_t* data;
  const uint16_t* meta;
  int32_t element, bits, axis, group, rank, page_tokens;  // rank: numbers in a row

  // Groups along the rank are near-equal multiples of 16 channels (kvlathe/plan/layout.py,
  // groups_along_rank).
  int64_t group_of(int token, int channel) const {
    if (axis == KVLATHE_AXIS_TOKEN)
      return int64_t{channel} * token_groups(page_tokens, group) + token / group;
    const RankGroups groups(rank, group);
    return int64_t{token} * groups.count + groups.of_step(channel / 16);
  }

  float at(int token, int channel) const {
    const int64_t row_major = int64_t{token} * rank + channel;
    if (!is_quantized(bits)) return load(data, row_major, element);
    const bool by_token = axis == KVLATHE_AXIS_TOKEN;
    const int64_t count = by_token ? page_tokens : rank;
    const uint8_t* row = data + (by_token ? channel : token) * count * bits / 8;
    const uint32_t code = packed_code(row, by_token ? token : channel, count, bits);
    const int64_t g = group_of(token, channel);
    const Format format{bits, axis, group};
    if (has_minimum(format.coding()))
      return float_of_half(meta[2 * g]) * float(code) + float_of_half(meta[2 * g + 1]);
    if (format.float8())
      return float_of_half(meta[g]) * (float_of_half(small_half_of(uint8_t(code))) * kFloat8Unit);
    const float magnitude = float_of_half(meta[g]);
    return magnitude * kTwo255ths * float(format.table()[code]) - magnitude;
  }
};

struct Call {
  const kvlathe_attend_decode_args& args;

  int64_t length(int part, int sequence) const {
    return args.parts[part].lengths[sequence * args.parts[part].lengths_stride];
  }

  bool hidden(int part, int sequence, int64_t token) const {
    const kvlathe_part& p = args.parts[part];
    if (!p.hidden) return false;
    const int32_t* places = p.hidden + sequence * p.hidden_stride;
    return token >= places[0] && token < places[1];
  }

  // Refuses lengths past the table and page ids outside the pool, for all sequences, before
  // anything is written.
  void check_pages() const {
    for (int p = 0; p < args.part_count; ++p) {
      const kvlathe_part& part = args.parts[p];
      const int64_t pages = args.pool_bytes / part.page_stride;
      for (int b = 0; b < args.batch; ++b) {
        const int64_t used = (length(p, b) + args.page_tokens - 1) / args.page_tokens;
        if (length(p, b) < 0 || used > part.page_table_stride) {
          throw Refusal(KVLATHE_TOO_SMALL, "sequence " + std::to_string(b) +
                                               " needs more pages than its page table has");
        }
        for (int64_t i = 0; i < used; ++i) {
          const int32_t id = part.page_table[int64_t{b} * part.page_table_stride + i];
          if (id < 0 || id >= pages)
            throw Refusal(KVLATHE_TOO_SMALL,
                          "page id " + std::to_string(id) + " lies outside the pool");
        }
      }
    }
  }

  Slab slab(int p, int sequence, int64_t token, const LaneRow& row, bool keys) const {
    const kvlathe_part& part = args.parts[p];
    const int64_t id =
        part.page_table[int64_t{sequence} * part.page_table_stride + token / args.page_tokens];
    const uint8_t* page = static_cast<const uint8_t*>(args.pool) + id * part.page_stride;
    const auto meta = reinterpret_cast<const uint16_t*>(page + (keys ? row.k_meta : row.v_meta));
    if (keys)
      return {page + row.k, meta,         args.element, part.bits_k,
              part.axis_k,  part.group_k, row.rank_k,   args.page_tokens};
    return {page + row.v, meta,         args.element,       part.bits_v,
            part.axis_v,  part.group_v, row_of_values(row), args.page_tokens};
  }

  // Visits every cached token of one lane that is seen: visit(slab of its page, token within the page).
  template <class Visit>
  void tokens(const Head& head, int sequence, bool keys, Visit visit) const {
    for (int p = 0; p < args.part_count; ++p) {
      if (!head.lane[p]) continue;
      for (int64_t t = 0; t < length(p, sequence); ++t) {
        if (!hidden(p, sequence, t))
          visit(slab(p, sequence, t, *head.lane[p], keys), int(t % args.page_tokens));
      }
    }
  }

  // `sink`: -infinity where there is none.
  void attend(const Head& head, int sequence, int query, float sink) const {
    std::vector<double> scores;
    const int64_t q = sequence * args.q_stride + head.q_offset + int64_t{query} * head.rank_k;
    tokens(head, sequence, true, [&](const Slab& keys, int t) {
      double dot = 0;
      for (int c = 0; c < head.rank_k; ++c)
        dot += double(load(args.q, q + c, args.element)) * keys.at(t, c);
      const double score = dot * args.scale;
      scores.push_back(args.softcap == 0 ? score : args.softcap * std::tanh(score / args.softcap));
    });
    const double m = scores.empty() ? 0 : *std::max_element(scores.begin(), scores.end());
    std::vector<double> o(head.rank_v, 0.0);
    double l = 0;
    size_t next = 0;
    tokens(head, sequence, false, [&](const Slab& values, int t) {
      const double weight = std::exp(scores[next++] - m);
      l += weight;
      for (int c = 0; c < head.rank_v; ++c) o[c] += weight * values.at(t, c);
    });
    if (l > 0) l += std::exp(double(sink) - m);
    const int64_t at = sequence * args.o_stride + head.o_offset + int64_t{query} * head.rank_v;
    for (int c = 0; c < head.rank_v; ++c)
      store(args.o, at + c, args.element, l > 0 ? float(o[c] / l) : 0.f);
  }
};

void attend_decode(const kvlathe_attend_decode_args& args) {
  if (args.prompts)
    throw Refusal(KVLATHE_UNSUPPORTED,
                  "prompt chunks are for CUDA: on the CPU each row is attended by itself");
  const std::vector<Head> heads = checked_heads(args);
  const Call call{args};
  call.check_pages();
  for (int b = 0; b < args.batch; ++b) {
    for (size_t i = 0; i < heads.size() * size_t(args.group_size); ++i) {
      const float sink = args.sinks ? args.sinks[i] : -INFINITY;
      call.attend(heads[i / args.group_size], b, int(i % args.group_size), sink);
    }
  }
}

}  // namespace
}  // namespace kvlathe

extern "C" int32_t kvlathe_cpu_attend_decode(const kvlathe_attend_decode_args* args,
                                             kvlathe_status* status) {
  return kvlathe::run(status, [&] {
    if (!args) throw kvlathe::Refusal(KVLATHE_BAD_ARGUMENT, "args is null");
    kvlathe::require(!(args->flags & KVLATHE_BUNDLES), KVLATHE_UNSUPPORTED,
                     "only the CUDA kernels take bundles of rows");
    kvlathe::attend_decode(*args);
  });
}
