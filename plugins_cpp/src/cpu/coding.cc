// Pages in fewer bytes, bit-exact (docs/cold_pages.md).
//
//     page     | version | a length for each plane | rows that repeat | planes |   AS_IT_IS in a length: not coded
//     plane    | log2 classes | classes of columns | code lengths of each class | stream lengths | streams |
//     stream   codes of an equal part of every column's rows, the first in the highest bits
//
// A row that an earlier one equals is left out: in a model's first layers V is that of the token
// alone. A column is what one channel has in a page, or one lane's scales. Columns alike are of one class,
// and a class has a Huffman code. Eight streams are decoded side by side: a processor waits for the
// bits of none.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "common/refusal.h"
#include "cpu/huffman.h"
#include "cpu/select.h"
#include "kvlathe/coding.h"
#include "kvlathe/cpu.h"

namespace kvlathe {
namespace {

constexpr uint8_t kVersion = 2;
constexpr uint32_t kAsItIs = 1u << 31;
constexpr int kMostRows = 256;         // of columns that have classes: their costs fit into 16 bits
constexpr int64_t kClassBytes = 8192;  // of a plane, at least, for each class
constexpr int kSampled = 256;          // columns that classes are found on
constexpr int kRounds = 2;             // of finding classes
constexpr double kLeastGain = 0.02;    // of a plane, that its classes have to save
constexpr double kTableBits = 1024;    // of a class's lengths
constexpr double kNoise = 0.99;        // of a plane's bits: who takes more is not coded
constexpr int64_t kHead = 1 + 4 * kStreams;

// Memory that a thread keeps from call to call: the system clears what is new, which takes as long as
// coding does.
class Scratch {
 public:
  uint8_t* of(int64_t bytes) {
    if (bytes > size_) {
      data_.reset(new uint8_t[size_t(bytes)]);
      size_ = bytes;
    }
    return data_.get();
  }

 private:
  std::unique_ptr<uint8_t[]> data_;
  int64_t size_ = 0;
};

using Matrix = kvlathe_coded_matrix;
using Part = kvlathe_coded_part;

int64_t columns_of(const Part& part) {
  int64_t columns = 0;
  for (int m = 0; m < part.matrices; ++m) columns += part.matrix[m].columns;
  return columns;
}

void check(const Matrix& m, const Part& part, int64_t bytes) {
  require(m.at >= 0 && m.columns >= 0 && m.row_stride > 0 && m.column_stride > 0 &&
              m.columns <= bytes && m.row_stride <= bytes && m.column_stride <= bytes,
          KVLATHE_BAD_ARGUMENT, "a matrix has a size that cannot be");
  if (m.columns == 0) return;
  const int64_t end =
      m.at + (part.rows - 1) * m.row_stride + (m.columns - 1) * m.column_stride + part.width;
  require(end <= bytes, KVLATHE_TOO_SMALL, "a matrix ends past its page");
}

void check(const kvlathe_coded_page* form) {
  require(form && (form->parts == 0 || form->part), KVLATHE_BAD_ARGUMENT, "a form is null");
  check_version(form->abi_version);
  require(form->bytes >= 0 && form->bytes < int64_t{kAsItIs} && form->parts >= 0,
          KVLATHE_BAD_ARGUMENT, "a page has 2^31 bytes or more");
  int64_t bytes = 0;
  for (int p = 0; p < form->parts; ++p) {
    const Part& part = form->part[p];
    require(part.rows > 0 && part.rows <= form->bytes &&
                (part.width == 1 || part.width == 2 || part.width == 4) &&
                (part.turn == 0 || (part.turn == 1 && part.width > 1)) && part.matrices >= 0 &&
                (part.matrices == 0 || part.matrix),
            KVLATHE_BAD_ARGUMENT, "a part has a size that cannot be");
    for (int m = 0; m < part.matrices; ++m) check(part.matrix[m], part, form->bytes);
    bytes += columns_of(part) * part.rows * part.width;
  }
  require(bytes == form->bytes, KVLATHE_BAD_ARGUMENT, "the parts of a page are not all of it");
}

int64_t planes_of(const kvlathe_coded_page& form) {
  int64_t planes = 0;
  for (int p = 0; p < form.parts; ++p) planes += form.part[p].width;
  return planes;
}

// Numbers of a matrix lie row by row, or column by column; so do its bytes in a plane that is not
// coded.
bool by_row(const Matrix& m) { return m.column_stride <= m.row_stride; }

// A matrix as runs of numbers that lie evenly.
struct Runs {
  int64_t count, length, apart, stride;
};

Runs runs_of(const Matrix& m, int64_t rows) {
  Runs runs = by_row(m) ? Runs{rows, m.columns, m.row_stride, m.column_stride}
                        : Runs{m.columns, rows, m.column_stride, m.row_stride};
  if (runs.apart == runs.length * runs.stride) runs = {1, runs.count * runs.length, 0, runs.stride};
  return runs;
}

// ---- Bits of what is said of a plane.

struct BitsOut {
  uint8_t* at;
  int free = 0;  // bits of at[-1]
  void put(uint32_t value, int bits) {
    for (int b = bits - 1; b >= 0; --b) {
      if (!free) *at++ = 0, free = 8;
      at[-1] = uint8_t(at[-1] | (value >> b & 1) << --free);
    }
  }
};

struct BitsIn {
  const uint8_t *at, *end;
  int left = 0;
  uint32_t take(int bits) {
    uint32_t value = 0;
    for (; bits; --bits) {
      if (!left) {
        require(at < end, KVLATHE_BAD_ARGUMENT, "a plane ends early");
        ++at, left = 8;
      }
      value = value << 1 | (at[-1] >> --left & 1);
    }
    return value;
  }
};

// ---- Rows that repeat.

constexpr int kMostMarked = 64;  // rows of a part whose repeats are looked for
constexpr int kLeastColumns = 8;

// The rows of a matrix that are kept, and for each row the place of the kept one that it equals.
struct Kept {
  int count;
  uint8_t row[kMostMarked], place[kMostMarked];
};

bool has_marks(const Part& part) { return part.rows >= 16 && part.rows <= kMostMarked; }

uint64_t hash_of(const uint8_t* row, const Matrix& m, int width) {
  uint64_t hash = 0;
  for (int64_t i = 0; i < 4; ++i) {
    const uint8_t* number = row + i * m.columns / 4 * m.column_stride;
    const uint64_t word = width == 1 ? number[0] : number[0] | number[1] << 8;
    hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 29;
  }
  return hash;
}

bool are_equal(const uint8_t* a, const uint8_t* b, const Matrix& m, int width) {
  if (m.column_stride == width) return std::memcmp(a, b, size_t(m.columns * width)) == 0;
  for (int64_t c = 0; c < m.columns; ++c)
    if (std::memcmp(a + c * m.column_stride, b + c * m.column_stride, size_t(width))) return false;
  return true;
}

// Sets the earliest row that each row equals: itself, mostly. Returns how many equal an earlier one.
int find_repeats(const Matrix& m, const Part& part, const uint8_t* page, uint8_t* earliest) {
  constexpr int kSlots = 256;
  uint64_t hashes[kMostMarked];
  uint8_t slots[kSlots] = {};  // a row and 1
  int found = 0;
  for (int r = 0; r < part.rows; ++r) {
    const uint8_t* row = page + m.at + r * m.row_stride;
    hashes[r] = hash_of(row, m, part.width);
    earliest[r] = uint8_t(r);
    uint64_t slot = hashes[r] % kSlots;
    for (; slots[slot]; slot = (slot + 1) % kSlots) {
      const int other = slots[slot] - 1;
      if (hashes[other] != hashes[r] ||
          !are_equal(row, page + m.at + other * m.row_stride, m, part.width))
        continue;
      earliest[r] = uint8_t(other);
      ++found;
      break;
    }
    if (!slots[slot]) slots[slot] = uint8_t(r + 1);
  }
  return found;
}

// Whether the kept rows of a matrix are whole columns of a part.
bool fits(const Matrix& m, const Part& part, int count) {
  return m.columns * count % part.rows == 0;
}

// The first of the rows that repeat are left out: as many as leave whole columns.
Kept kept_of(const Matrix& m, const Part& part, const uint8_t* page) {
  uint8_t earliest[kMostMarked];
  const int rows = std::min(part.rows, kMostMarked);
  int left_out = m.columns < kLeastColumns ? 0 : find_repeats(m, part, page, earliest);
  while (!fits(m, part, part.rows - left_out)) left_out -= 1;
  Kept kept = {};
  for (int r = 0; r < rows; ++r) {
    const bool own = !left_out || earliest[r] == r;
    kept.place[r] = own ? uint8_t(kept.count) : kept.place[earliest[r]];
    if (own && kept.count < kMostMarked) kept.row[kept.count++] = uint8_t(r);
    left_out -= !own;
  }
  return kept;
}

// A bit says whether rows of a matrix repeat; then each row has a bit, and the place of the one that
// it equals.
void put_kept(BitsOut& out, const Kept& kept, int rows) {
  out.put(kept.count < rows, 1);
  for (int r = 0, next = 0; kept.count < rows && r < rows; ++r) {
    const bool own = next < kept.count && kept.row[next] == r;
    out.put(!own, 1);
    if (own) {
      ++next;
    } else {
      out.put(kept.place[r], 6);
    }
  }
}

Kept take_kept(BitsIn& in, const Matrix& m, const Part& part) {
  Kept kept = {};
  const bool repeats = in.take(1);
  for (int r = 0; r < part.rows; ++r) {
    if (repeats && in.take(1)) {
      kept.place[r] = uint8_t(in.take(6));
      require(kept.place[r] < kept.count, KVLATHE_BAD_ARGUMENT, "a row repeats a later one");
    } else {
      kept.place[r] = uint8_t(kept.count);
      kept.row[kept.count++] = uint8_t(r);
    }
  }
  require(fits(m, part, kept.count), KVLATHE_BAD_ARGUMENT, "rows repeat that cannot");
  return kept;
}

// What is left of a part: a Kept for each matrix, or none where the part has no marks.
using Marks = std::vector<Kept>;

int64_t rows_left(const Part& part, const Marks& marks, int m) {
  return marks.empty() ? part.rows : marks[size_t(m)].count;
}

// Bytes of a plane.
int64_t plane_bytes(const Part& part, const Marks& marks) {
  int64_t bytes = 0;
  for (int m = 0; m < part.matrices; ++m)
    bytes += part.matrix[m].columns * rows_left(part, marks, m);
  return bytes;
}

// ---- A plane as columns, and back.

void split_kept(const Kernels& k, const Part& part, const Matrix& m, const Kept& kept, int i,
                const uint8_t* page, uint8_t* plane) {
  if (by_row(m)) {
    for (int j = 0; j < kept.count; ++j, plane += m.columns) {
      k.split_numbers(page + m.at + kept.row[j] * m.row_stride, m.columns, m.column_stride,
                      part.width, part.turn, i, plane);
    }
    return;
  }
  uint8_t all[kMostMarked];
  for (int64_t c = 0; c < m.columns; ++c, plane += kept.count) {
    k.split_numbers(page + m.at + c * m.column_stride, part.rows, m.row_stride, part.width,
                    part.turn, i, all);
    for (int j = 0; j < kept.count; ++j) plane[j] = all[kept.row[j]];
  }
}

void split_plane(const Kernels& k, const Part& part, const Marks& marks, int i, const uint8_t* page,
                 uint8_t* plane) {
  for (int m = 0; m < part.matrices; ++m) {
    const Matrix& matrix = part.matrix[m];
    const int64_t rows = rows_left(part, marks, m);
    if (rows < part.rows) {
      split_kept(k, part, matrix, marks[size_t(m)], i, page, plane);
      plane += rows * matrix.columns;
      continue;
    }
    const Runs runs = runs_of(matrix, part.rows);
    for (int64_t r = 0; r < runs.count; ++r, plane += runs.length) {
      k.split_numbers(page + matrix.at + r * runs.apart, runs.length, runs.stride, part.width,
                      part.turn, i, plane);
    }
  }
}

void join_kept(const Kernels& k, const Part& part, const Matrix& m, const Kept& kept,
               const uint8_t* const* planes, uint8_t* page) {
  const uint8_t* from[4];
  if (by_row(m)) {
    for (int r = 0; r < part.rows; ++r) {
      for (int i = 0; i < part.width; ++i) from[i] = planes[i] + kept.place[r] * m.columns;
      k.join_numbers(from, m.columns, m.column_stride, part.width, part.turn,
                     page + m.at + r * m.row_stride);
    }
    return;
  }
  uint8_t all[4][kMostMarked];
  for (int i = 0; i < part.width; ++i) from[i] = all[i];
  for (int64_t c = 0; c < m.columns; ++c) {
    for (int i = 0; i < part.width; ++i)
      for (int r = 0; r < part.rows; ++r) all[i][r] = planes[i][c * kept.count + kept.place[r]];
    k.join_numbers(from, part.rows, m.row_stride, part.width, part.turn,
                   page + m.at + c * m.column_stride);
  }
}

void join_planes(const Kernels& k, const Part& part, const Marks& marks,
                 const uint8_t* const* planes, uint8_t* page) {
  const uint8_t* at[4];
  std::copy(planes, planes + part.width, at);
  for (int m = 0; m < part.matrices; ++m) {
    const Matrix& matrix = part.matrix[m];
    const int64_t rows = rows_left(part, marks, m);
    if (rows < part.rows) {
      join_kept(k, part, matrix, marks[size_t(m)], at, page);
      for (int i = 0; i < part.width; ++i) at[i] += rows * matrix.columns;
      continue;
    }
    const Runs runs = runs_of(matrix, part.rows);
    for (int64_t r = 0; r < runs.count; ++r) {
      k.join_numbers(at, runs.length, runs.stride, part.width, part.turn,
                     page + matrix.at + r * runs.apart);
      for (int i = 0; i < part.width; ++i) at[i] += runs.length;
    }
  }
}

// Between the order of a plane and that of columns.
void reorder(const Kernels& k, const Part& part, const Marks& marks, const uint8_t* from,
             uint8_t* to, bool forth) {
  for (int m = 0; m < part.matrices; ++m) {
    const Matrix& matrix = part.matrix[m];
    const int64_t rows = rows_left(part, marks, m), size = matrix.columns * rows;
    if (!by_row(matrix)) {
      std::memcpy(to, from, size_t(size));
    } else if (forth) {
      k.transpose_bytes(from, rows, matrix.columns, to);
    } else {
      k.transpose_bytes(from, matrix.columns, rows, to);
    }
    from += size, to += size;
  }
}

// ---- Classes of columns.

// log2 to a hundredth: of counts, for costs.
float rough_log2(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const float exponent = float(int32_t(bits >> 23) - 127);
  bits = (bits & 0x7FFFFF) | 0x3F800000;
  float m;
  std::memcpy(&m, &bits, sizeof m);
  return exponent + (m - 1) * (2.0f - m * 0.3355f - 0.3293f) + 0.004f;
}

using Histograms = std::vector<uint32_t>;  // [kMostClasses][256]

double bits_of(const uint32_t* histogram) {
  double total = 0, bits = 0;
  for (int s = 0; s < 256; ++s) {
    const double n = histogram[s];
    total += n;
    bits -= n ? n * double(rough_log2(float(n))) : 0;
  }
  return total ? bits + total * double(rough_log2(float(total))) : 0;
}

void sum_classes(const uint32_t* histograms, uint32_t* sum) {
  std::fill_n(sum, 256, 0u);
  for (int c = 0; c < kMostClasses; ++c)
    for (int s = 0; s < 256; ++s) sum[s] += histograms[c * 256 + s];
}

// Bits that classes save of what was counted.
double saved_by(const uint32_t* histograms) {
  uint32_t sum[256];
  sum_classes(histograms, sum);
  double saved = bits_of(sum);
  for (int c = 0; c < kMostClasses; ++c) saved -= bits_of(histograms + c * 256);
  return saved;
}

// [256][kMostClasses]: a sixteenth of a bit is 1. A symbol that a class has not had counts as a
// quarter of one.
void write_costs(const uint32_t* histograms, int classes, uint16_t* costs) {
  std::fill_n(costs, 256 * kMostClasses, uint16_t{255});
  for (int c = 0; c < classes; ++c) {
    const uint32_t* own = histograms + c * 256;
    uint32_t total = 0;
    for (int s = 0; s < 256; ++s) total += own[s];
    const float most = rough_log2(float(total) + 64);
    for (int s = 0; s < 256; ++s) {
      const float bits = 16 * (most - rough_log2(float(own[s]) + 0.25f));
      costs[s * kMostClasses + c] = uint16_t(std::min(std::max(bits, 0.0f), 239.0f));
    }
  }
}

// The first classes: as many columns each, by the mean of their bytes without the highest bit,
// which is the sign of halves.
void divide_by_size(const uint8_t* columns, int64_t count, int64_t step, int rows, int classes,
                    uint8_t* out) {
  constexpr int kPlaces = 1024;
  std::vector<uint16_t> place(size_t((count + step - 1) / step));
  uint32_t before[kPlaces + 1] = {};
  for (size_t i = 0; i < place.size(); ++i) {
    const uint8_t* column = columns + int64_t(i) * step * rows;
    uint32_t sum = 0;
    for (int r = 0; r < rows; ++r) sum += column[r] & 127;
    place[i] = uint16_t(sum * kPlaces / (128u * uint32_t(rows)));
    ++before[place[i] + 1];
  }
  for (int i = 0; i < kPlaces; ++i) before[i + 1] += before[i];
  for (size_t i = 0; i < place.size(); ++i)
    out[int64_t(i) * step] = uint8_t(before[place[i]] * size_t(classes) / place.size());
}

int log2_of(int classes) {
  int bits = 0;
  while (1 << bits < classes) ++bits;
  return bits;
}

// A power of two: 1 where a plane is too small for more.
int classes_for(int64_t count, int rows) {
  if (rows > kMostRows || rows < kStreams || count < 4 * kMostClasses) return 1;
  int classes = 1;
  while (2 * classes <= kMostClasses && 2 * classes * kClassBytes <= count * rows) classes *= 2;
  return classes;
}

// Writes the class of every column, of `most` at most, and returns how many classes there are. `histograms` are those of
// all columns. Lloyd's iteration on some columns, in which a class's centre is its code.
int choose_classes(const Kernels& k, const uint8_t* columns, int64_t count, int rows, int most,
                   uint8_t* classes, Histograms& histograms) {
  const auto recount = [&](int64_t step, const uint8_t* of) {
    std::fill(histograms.begin(), histograms.end(), 0u);
    k.count_columns(columns, count, int(step), rows, of, histograms.data());
  };
  if (most > 1) {
    const int64_t step = std::max<int64_t>(1, count / kSampled);
    const double wanted =
        kLeastGain * 8 * double(count) * rows + double(count) * log2_of(most) + kTableBits * most;
    uint16_t costs[256 * kMostClasses];
    divide_by_size(columns, count, step, rows, most, classes);
    for (int round = 0; round < kRounds; ++round) {
      recount(step, classes);
      write_costs(histograms.data(), most, costs);
      if (round + 1 < kRounds) k.classify(columns, count, int(step), rows, costs, classes);
    }
    if (saved_by(histograms.data()) * double(step) > wanted) {
      k.classify(columns, count, 1, rows, costs, classes);
      recount(1, classes);
      return most;
    }
  }
  recount(1, nullptr);
  return 1;
}

// ---- Lengths of codes.

// Lengths of symbols that occur are told by their step from the last one (8 at first): none, one more,
// one less, or four bits; symbols that do not occur, by how many follow one another. Each word is as
// many bits 1 and a 0, the last one four bits 1.
enum { kSame, kMore, kLess, kAbsent, kAny };
constexpr int kFirstLength = 8;

void put_kind(BitsOut& out, int kind) {
  if (kind == kAny) return out.put(15, 4);
  out.put((1u << (kind + 1)) - 2, kind + 1);
}

int take_kind(BitsIn& in) {
  int kind = 0;
  while (kind < kAny && in.take(1)) ++kind;
  return kind;
}

void put_lengths(BitsOut& out, const CodeLengths& lengths) {
  int last = kFirstLength;
  for (int s = 0; s < 256;) {
    const int length = lengths.of[s];
    int run = 1;
    if (length == 0) {
      while (s + run < 256 && lengths.of[s + run] == 0) ++run;
      put_kind(out, kAbsent);
      out.put(uint32_t(run - 1), 8);
    } else if (length >= last - 1 && length <= last + 1) {
      put_kind(out, length == last ? kSame : length > last ? kMore : kLess);
      last = length;
    } else {
      put_kind(out, kAny);
      out.put(uint32_t(length), 4);
      last = length;
    }
    s += run;
  }
}

CodeLengths take_lengths(BitsIn& in) {
  CodeLengths lengths = {};
  int last = kFirstLength;
  for (int s = 0; s < 256;) {
    const int kind = take_kind(in);
    if (kind == kAbsent) {
      s += 1 + int(in.take(8));
      require(s <= 256, KVLATHE_BAD_ARGUMENT, "a code has more than 256 symbols");
      continue;
    }
    last = kind == kAny ? int(in.take(4)) : last + (kind == kMore) - (kind == kLess);
    require(last > 0 && last <= kCodeBits, KVLATHE_BAD_ARGUMENT,
            "a code has a length that cannot be");
    lengths.of[s++] = uint8_t(last);
  }
  return lengths;
}

// ---- A plane.

void put_word(uint8_t* at, uint32_t word, int bytes = 4) {
  for (int i = 0; i < bytes; ++i) at[i] = uint8_t(word >> 8 * i);
}

uint32_t word_at(const uint8_t* at, int bytes = 4) {
  uint32_t word = 0;
  for (int i = 0; i < bytes; ++i) word |= uint32_t{at[i]} << 8 * i;
  return word;
}

// Bytes of a stream's length, by those of its plane.
int length_bytes(int64_t plane) { return plane < 1 << 15 ? 2 : 4; }

// Bytes that a coded plane can take: what classes and lengths take, and codes of kCodeBits bits.
int64_t plane_bound(const Part& part) {
  const int64_t columns = columns_of(part);
  const int64_t each = (part.rows + kStreams - 1) / kStreams;
  return kHead + columns + kMostClasses * 256 + kStreams * (columns * each * kCodeBits / 8 + 16);
}

// The bits that a sample of a plane takes, of those that it has.
double share_of(const Kernels& k, const uint8_t* plane, int64_t bytes) {
  constexpr int kRun = 64, kStep = 8;
  if (bytes < 64 * kRun) return 0;
  uint32_t histogram[kMostClasses * 256] = {};
  k.count_columns(plane, bytes / kRun, kStep, kRun, nullptr, histogram);
  uint32_t counted = 0;
  for (int s = 0; s < 256; ++s) counted += histogram[s];
  return bits_of(histogram) / (8 * double(counted));
}

// What a thread works in.
struct Room {
  Scratch plane, columns, classes, streams, planes[4];
  Histograms histograms = Histograms(size_t(kMostClasses) * 256);
  std::vector<uint32_t> codes = std::vector<uint32_t>(size_t(kMostClasses) * 256);
  std::vector<uint16_t> entries = std::vector<uint16_t>(size_t(kMostClasses) << kCodeBits);
  std::vector<Marks> marks;  // of each part
};

Room& own_room() {
  thread_local Room room;
  return room;
}

int64_t put_streams(const Kernels& k, Room& room, const uint8_t* columns, int rows, int64_t count,
                    const uint8_t* classes, uint8_t* at) {
  const int64_t each = (rows + kStreams - 1) / kStreams;
  const int64_t most = count * each * kCodeBits / 8 + 16;
  uint8_t* outs[kStreams];
  int64_t sizes[kStreams];
  outs[0] = room.streams.of(kStreams * most);
  for (int s = 1; s < kStreams; ++s) outs[s] = outs[s - 1] + most;
  k.encode_columns(columns, count, rows, classes, room.codes.data(), outs, sizes);
  const int word = length_bytes(count * rows);
  uint8_t* stream = at + word * kStreams;
  for (int s = 0; s < kStreams; stream += sizes[s], ++s) {
    put_word(at + word * s, uint32_t(sizes[s]), word);
    std::memcpy(stream, outs[s], size_t(sizes[s]));
  }
  return stream - at;
}

// A plane, coded to `out`: how many bytes; or `size`, where it is noise.
int64_t encode_plane(const Kernels& k, Room& room, const Part& part, const Marks& marks,
                     const uint8_t* plane, int64_t size, uint8_t* out) {
  if (size == 0 || share_of(k, plane, size) > kNoise) return size;
  uint8_t* columns = room.columns.of(size);
  reorder(k, part, marks, plane, columns, true);
  const int64_t count = size / part.rows;
  uint8_t* classes = room.classes.of(count);
  const int most = part.width > 1 ? classes_for(count, part.rows) : 1;  // codes are alike
  const int many = choose_classes(k, columns, count, part.rows, most, classes, room.histograms);
  out[0] = uint8_t(log2_of(many));
  BitsOut head{out + 1};
  for (int64_t c = 0; many > 1 && c < count; ++c) head.put(classes[c], out[0]);
  for (int c = 0; c < many; ++c) {
    const CodeLengths lengths = code_lengths(room.histograms.data() + c * 256);
    put_lengths(head, lengths);
    write_codes(lengths, room.codes.data() + c * 256);
  }
  const uint8_t* of = many > 1 ? classes : nullptr;
  return head.at - out + put_streams(k, room, columns, part.rows, count, of, head.at);
}

int64_t bound_of(const kvlathe_coded_page& form) {
  int64_t bound = 1 + 4 * planes_of(form);
  for (int p = 0; p < form.parts; ++p) {
    bound += form.part[p].width * plane_bound(form.part[p]);
    bound += kMostMarked * int64_t{form.part[p].matrices};
  }
  return bound;
}

// Finds the rows that repeat, and says which to `out`. Returns where that ends.
uint8_t* mark(const kvlathe_coded_page& form, const uint8_t* page, Room& room, uint8_t* out) {
  BitsOut bits{out};
  room.marks.assign(size_t(form.parts), {});
  for (int p = 0; p < form.parts; ++p) {
    const Part& part = form.part[p];
    for (int m = 0; has_marks(part) && m < part.matrices; ++m) {
      room.marks[size_t(p)].push_back(kept_of(part.matrix[m], part, page));
      put_kept(bits, room.marks[size_t(p)].back(), part.rows);
    }
  }
  return bits.at;
}

int64_t encode_page(const kvlathe_coded_page& form, const uint8_t* page, uint8_t* out) {
  const Kernels& k = kernels_for(KVLATHE_ISA_AUTO);
  Room& room = own_room();
  out[0] = kVersion;
  uint8_t* length = out + 1;
  uint8_t* at = mark(form, page, room, length + 4 * planes_of(form));
  for (int p = 0; p < form.parts; ++p) {
    const Part& part = form.part[p];
    const Marks& marks = room.marks[size_t(p)];
    const int64_t size = plane_bytes(part, marks);
    uint8_t* plane = room.plane.of(size);
    for (int i = 0; i < part.width; ++i, length += 4) {
      split_plane(k, part, marks, i, page, plane);
      const int64_t coded = encode_plane(k, room, part, marks, plane, size, at);
      if (coded < size) {
        put_word(length, uint32_t(coded));
        at += coded;
      } else {
        put_word(length, uint32_t(size) | kAsItIs);
        if (size) std::memcpy(at, plane, size_t(size));
        at += size;
      }
    }
  }
  return at - out;
}

// The columns of a coded plane.
void decode_plane(const Kernels& k, Room& room, const Part& part, int64_t count,
                  const uint8_t* data, int64_t bytes, uint8_t* columns) {
  require(bytes > 0 && data[0] <= log2_of(kMostClasses), KVLATHE_BAD_ARGUMENT,
          "a plane has more classes than there are");
  const int many = 1 << data[0];
  BitsIn head{data + 1, data + bytes};
  uint8_t* classes = room.classes.of(count);
  for (int64_t c = 0; many > 1 && c < count; ++c) classes[c] = uint8_t(head.take(data[0]));
  for (int c = 0; c < many; ++c) {
    require(write_entries(take_lengths(head), room.entries.data() + (size_t(c) << kCodeBits)),
            KVLATHE_BAD_ARGUMENT, "lengths are not those of a code");
  }
  const uint8_t *at = head.at, *end = data + bytes;
  const int word = length_bytes(count * part.rows);
  require(end - at >= word * kStreams, KVLATHE_BAD_ARGUMENT, "a plane ends early");
  CodedStream streams[kStreams];
  const uint8_t* stream = at + word * kStreams;
  for (int s = 0; s < kStreams; ++s, at += word) {
    streams[s] = {stream, int64_t{word_at(at, word)}};
    require(streams[s].bytes <= end - stream, KVLATHE_BAD_ARGUMENT, "a stream ends early");
    stream += streams[s].bytes;
  }
  require(stream == end, KVLATHE_BAD_ARGUMENT, "a plane has bytes of no stream");
  int64_t positions[kStreams] = {};
  k.decode_columns(columns, count, part.rows, many > 1 ? classes : nullptr, room.entries.data(),
                   streams, positions);
  for (int s = 0; s < kStreams; ++s) {
    require((positions[s] + 7) / 8 == streams[s].bytes, KVLATHE_BAD_ARGUMENT,
            "a stream has another size");
  }
}

// The bytes of plane i of a part, which come from `data`.
const uint8_t* plane_of(const Kernels& k, Room& room, const Part& part, const Marks& marks, int i,
                        uint32_t length, const uint8_t* data) {
  const int64_t size = plane_bytes(part, marks), coded = length & ~kAsItIs;
  if (length & kAsItIs) {
    require(coded == size, KVLATHE_BAD_ARGUMENT, "a plane has another size");
    return data;
  }
  uint8_t* columns = room.columns.of(size);
  uint8_t* plane = room.planes[i].of(size);
  decode_plane(k, room, part, size / part.rows, data, coded, columns);
  reorder(k, part, marks, columns, plane, false);
  return plane;
}

// The rows that repeat. Returns where that ends.
const uint8_t* take_marks(const kvlathe_coded_page& form, const uint8_t* data, const uint8_t* end,
                          Room& room) {
  BitsIn bits{data, end};
  room.marks.assign(size_t(form.parts), {});
  for (int p = 0; p < form.parts; ++p) {
    const Part& part = form.part[p];
    for (int m = 0; has_marks(part) && m < part.matrices; ++m)
      room.marks[size_t(p)].push_back(take_kept(bits, part.matrix[m], part));
  }
  return bits.at;
}

void decode_page(const kvlathe_coded_page& form, const uint8_t* data, int64_t bytes,
                 uint8_t* page) {
  const Kernels& k = kernels_for(KVLATHE_ISA_AUTO);
  Room& room = own_room();
  const int64_t head = 1 + 4 * planes_of(form);
  require(bytes >= head, KVLATHE_BAD_ARGUMENT, "it ends early");
  require(data[0] == kVersion, KVLATHE_BAD_ARGUMENT, "it is of version " + std::to_string(data[0]));
  const uint8_t *length = data + 1, *end = data + bytes;
  const uint8_t* at = take_marks(form, data + head, end, room);
  for (int p = 0; p < form.parts; ++p) {
    const Part& part = form.part[p];
    const Marks& marks = room.marks[size_t(p)];
    const uint8_t* planes[4];
    for (int i = 0; i < part.width; ++i, length += 4) {
      const uint32_t word = word_at(length);
      const int64_t coded = word & ~kAsItIs;
      require(coded <= end - at, KVLATHE_BAD_ARGUMENT, "it ends early");
      planes[i] = plane_of(k, room, part, marks, i, word, at);
      at += coded;
    }
    join_planes(k, part, marks, planes, page);
  }
  require(at == end, KVLATHE_BAD_ARGUMENT, "it has bytes of no plane");
}

}  // namespace
}  // namespace kvlathe

extern "C" int64_t kvlathe_coded_bound(const kvlathe_coded_page* form, kvlathe_status* status) {
  int64_t bound = -1;
  kvlathe::run(status, [&] {
    kvlathe::check(form);
    bound = kvlathe::bound_of(*form);
  });
  return bound;
}

extern "C" int32_t kvlathe_encode_page(const kvlathe_coded_page* form, const void* page, void* out,
                                       int64_t room, int64_t* written, kvlathe_status* status) {
  return kvlathe::run(status, [&] {
    kvlathe::check(form);
    kvlathe::require(page && out && written, KVLATHE_BAD_ARGUMENT, "page, out or written is null");
    kvlathe::require(room >= kvlathe::bound_of(*form), KVLATHE_TOO_SMALL, "out is too small");
    *written =
        kvlathe::encode_page(*form, static_cast<const uint8_t*>(page), static_cast<uint8_t*>(out));
  });
}

extern "C" int32_t kvlathe_decode_page(const kvlathe_coded_page* form, const void* data,
                                       int64_t bytes, void* page, kvlathe_status* status) {
  return kvlathe::run(status, [&] {
    kvlathe::check(form);
    kvlathe::require(data && page && bytes >= 0, KVLATHE_BAD_ARGUMENT, "data or page is null");
    kvlathe::decode_page(*form, static_cast<const uint8_t*>(data), bytes,
                         static_cast<uint8_t*>(page));
  });
}
