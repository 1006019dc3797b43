// One instruction set's table of kernels; the build compiles this file once per set, with that set's flags.
//
// Nothing from the standard library's templates may be used in what this file includes: the linker would be free to
// keep a copy compiled for AVX-512 and call it everywhere.
#include "../kernels.h"
#include "../widen.h"

#if defined(VLLM_VARIANT_AVX512)
#define VLLM_VARIANT avx512
#define VLLM_TABLE kAvx512Kernels
#include "../simd/avx512.h"
#include "../simd/dot_avx512.h"
#include "../simd/keys_avx512.h"
#elif defined(VLLM_VARIANT_AVX2)
#define VLLM_VARIANT avx2
#define VLLM_TABLE kAvx2Kernels
#include "../simd/avx2.h"
#include "../simd/dot_avx2.h"
#include "../simd/keys_avx2.h"
#else
#define VLLM_VARIANT portable
#define VLLM_TABLE kPortableKernels
#include "../simd/dot_portable.h"
#include "../simd/keys_portable.h"
#include "../simd/portable.h"
#endif

#include "stretch.h"
//
#include "attention.h"
#include "gumbel.h"
#include "layers.h"
#include "linear.h"

#define VLLM_TEXT_OF(x) #x
#define VLLM_TEXT(x) VLLM_TEXT_OF(x)

namespace vllm::cpu {

extern const Kernels VLLM_TABLE;
const Kernels VLLM_TABLE = {
    VLLM_TEXT(VLLM_VARIANT),
    VLLM_VARIANT::scan,
    VLLM_VARIANT::sum_exp,
    VLLM_VARIANT::count_greater,
    VLLM_VARIANT::count_at_least,
    VLLM_VARIANT::find_equal,
    VLLM_VARIANT::select_greater,
    VLLM_VARIANT::select_between,
    VLLM_VARIANT::weigh,
    VLLM_VARIANT::remove_below,
    VLLM_VARIANT::subtract,
    VLLM_VARIANT::draw,
    VLLM_VARIANT::philox,
    VLLM_VARIANT::attend_float32,
    VLLM_VARIANT::attend_bfloat16,
    VLLM_VARIANT::rms_norm,
    VLLM_VARIANT::rotate,
    {VLLM_VARIANT::activate<VLLM_VARIANT::Silu>, VLLM_VARIANT::activate<VLLM_VARIANT::Gelu>,
     VLLM_VARIANT::activate<VLLM_VARIANT::GeluTanh>, VLLM_VARIANT::activate<VLLM_VARIANT::Relu>},
    VLLM_VARIANT::gemv_float32,
    VLLM_VARIANT::gemv_bfloat16,
    VLLM_VARIANT::gemv_int8,
    VLLM_VARIANT::gemv_int8_groups,
    VLLM_VARIANT::kSumLanes,
    VLLM_VARIANT::kMostPanelRows,
    VLLM_VARIANT::multiply_panel,
    VLLM_VARIANT::widen_float32,
    VLLM_VARIANT::widen_bfloat16,
    VLLM_VARIANT::widen_int8,
    VLLM_VARIANT::widen_int8_groups,
    VLLM_VARIANT::transpose,
};

}  // namespace vllm::cpu
