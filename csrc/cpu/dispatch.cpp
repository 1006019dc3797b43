// Chooses the instruction-set variant once, at the first use, and lets tests choose another.
#include <atomic>
#include <cstring>

#include "api.h"
#include "kernels.h"

namespace vllm::cpu {

extern const Kernels kPortableKernels;
#ifdef VLLM_HAS_AVX2
extern const Kernels kAvx2Kernels;
#endif
#ifdef VLLM_HAS_AVX512
extern const Kernels kAvx512Kernels;
#endif

namespace {

const Kernels* find_variant(const char* name) {
  const bool any = std::strcmp(name, "auto") == 0;
#ifdef VLLM_HAS_AVX512
  if ((any || std::strcmp(name, "avx512") == 0) && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return &kAvx512Kernels;
  }
#endif
#ifdef VLLM_HAS_AVX2
  if ((any || std::strcmp(name, "avx2") == 0) && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return &kAvx2Kernels;
  }
#endif
  return any || std::strcmp(name, "portable") == 0 ? &kPortableKernels : nullptr;
}

std::atomic<const Kernels*> active_kernels{nullptr};

}  // namespace

const Kernels& get_kernels() {
  const Kernels* kernels = active_kernels.load(std::memory_order_acquire);
  if (kernels == nullptr) {
    kernels = find_variant("auto");
    active_kernels.store(kernels, std::memory_order_release);
  }
  return *kernels;
}

}  // namespace vllm::cpu

int32_t vllm_abi_version() { return kVllmAbiVersion; }

const char* vllm_get_variant() { return vllm::cpu::get_kernels().name; }

int32_t vllm_set_variant(const char* name) {
  const vllm::cpu::Kernels* kernels = vllm::cpu::find_variant(name);
  if (kernels == nullptr) return vllm::cpu::kUnknownVariant;
  vllm::cpu::active_kernels.store(kernels, std::memory_order_release);
  return vllm::cpu::kOk;
}
