// Compiles the Highway code of a file for AVX-512 (HWY_AVX3_DL) alone: for kernels on AMX tiles, whose machines all
// have it. Include it before any other Highway header and without hwy/foreach_target.h, and call the result as
// HWY_NAMESPACE::fn(), behind has_amx_bf16().
#pragma once

#include <hwy/detect_targets.h>

#undef HWY_TARGET
#define HWY_TARGET HWY_AVX3_DL
