#include "polyop/cpu/amx.h"

#include <hwy/targets.h>

#include <cstdlib>
#include <string_view>

#if POLYOP_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace polyop::cpu {
namespace {

#if POLYOP_AMX

// CPUID leaf 7, register EDX.
constexpr unsigned kAmxBf16Bit = 1u << 22;
constexpr unsigned kAmxTileBit = 1u << 24;
constexpr unsigned kAmxInt8Bit = 1u << 25;
// CPUID leaf 7.1, register EAX.
constexpr unsigned kAvx512Bf16Bit = 1u << 5;
// arch_prctl(2): Linux gives the large tile registers to a process that asks.
constexpr long kRequestPermission = 0x1023;
constexpr long kTileData = 18;

bool find_amx(unsigned product_bit) {
  const char* setting = std::getenv("POLYOP_AMX");
  if (setting != nullptr && std::string_view(setting) == "0") return false;
  if ((hwy::SupportedTargets() & HWY_AVX3_DL) == 0) return false;
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  if ((edx & product_bit) == 0 || (edx & kAmxTileBit) == 0) return false;
  if (__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) == 0 || (eax & kAvx512Bf16Bit) == 0) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

#else

constexpr unsigned kAmxBf16Bit = 0;
constexpr unsigned kAmxInt8Bit = 0;

bool find_amx(unsigned) { return false; }

#endif

}  // namespace

bool has_amx_bf16() {
  static const bool found = find_amx(kAmxBf16Bit);
  return found;
}

bool has_amx_int8() {
  static const bool found = find_amx(kAmxInt8Bit);
  return found;
}

}  // namespace polyop::cpu
