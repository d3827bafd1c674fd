// Compiled once for each instruction set, with KVLATHE_KERNELS naming the table (kernels.h). All in
// one translation unit and unnamed namespaces, without standard containers or algorithms: an inline
// function that is shared with code for another processor would take that processor's instructions
// along.
#include "cpu/kernels.h"

#include "cpu/columns.h"
#include "cpu/products.h"
#include "cpu/quantize.h"
#include "cpu/read_codes.h"
#include "cpu/softmax.h"

namespace kvlathe {

const Kernels KVLATHE_KERNELS = {KVLATHE_KERNELS_NAME,
                                 rotate,
                                 multiply,
                                 dots,
                                 mix,
                                 unpack,
                                 transpose,
                                 bound_scores,
                                 soften,
                                 store_row,
                                 quantize,
                                 decode_columns,
                                 encode_columns,
                                 classify,
                                 count_columns,
                                 transpose_bytes,
                                 split_numbers,
                                 join_numbers};

}  // namespace kvlathe
