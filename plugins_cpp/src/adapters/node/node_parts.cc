#include "adapters/node/node_parts.h"

#include <algorithm>

namespace kvlathe {
namespace {

// The bucket that gets the full pages of a lane; -1: they stay.
int32_t sealed_of(const Layer& layer, size_t lane) {
  int32_t found = -1;
  for (int32_t s = 0; s < layer.head.buckets; ++s)
    if (layer.buckets[s].rows[lane] && s != layer.lanes[lane].fresh) found = s;
  return found;
}

bool alike(const kvlathe_window& a, const kvlathe_window& b) {
  return a.sink == b.sink && a.recent == b.recent && a.exact == b.exact && a.fresh == b.fresh;
}

void add_bucket(const Layer& layer, int32_t s, std::vector<NodePart>& parts) {
  const size_t first = parts.size();
  for (size_t h = 0; h < layer.lanes.size(); ++h) {
    const LaneRow* row = layer.buckets[s].rows[h];
    if (!row) continue;
    const Lane& lane = layer.lanes[h];
    const int32_t sealed = s == lane.fresh ? sealed_of(layer, h) : s;
    const kvlathe_window window{lane.sink, lane.recent, lane.exact, sealed, lane.fresh};
    auto part = std::find_if(parts.begin() + first, parts.end(),
                             [&](const NodePart& x) { return alike(x.window, window); });
    if (part == parts.end()) part = parts.insert(part, NodePart{s, {}, window});
    part->window.sealed = std::max(part->window.sealed, sealed);
    const auto* numbers = reinterpret_cast<const int32_t*>(row);
    part->lanes.insert(part->lanes.end(), numbers, numbers + KVLATHE_LANE_COLUMNS);
  }
  if (parts.size() == first) parts.push_back({s, {}, {0, kNoEnd, 0, -1, s}});
}

}  // namespace

std::vector<NodePart> node_parts(const Layer& layer) {
  std::vector<NodePart> parts;
  for (int32_t s = 0; s < layer.head.buckets; ++s) add_bucket(layer, s, parts);
  return parts;
}

std::vector<int32_t> attended_parts(const std::vector<NodePart>& parts) {
  std::vector<int32_t> attended;
  for (size_t i = 0; i < parts.size(); ++i)
    if (parts[i].lane_count()) attended.push_back(int32_t(i));
  return attended;
}

kvlathe_window window_among(const std::vector<NodePart>& parts,
                            const std::vector<int32_t>& attended, const NodePart& own) {
  kvlathe_window window = own.window;
  window.sealed = -1;
  for (size_t i = 0; i < attended.size(); ++i) {
    const NodePart& other = parts[size_t(attended[i])];
    if (!alike(other.window, own.window)) continue;
    (other.bucket == own.window.fresh ? window.fresh : window.sealed) = int32_t(i);
  }
  return window;
}

}  // namespace kvlathe
