// What other parts of the library may ask of products, beside the products themselves (api.h).
#pragma once

#include <cstdint>

#include "api.h"

namespace vllm::cpu {

// Says that this product of `num_rows` rows is the team's next one: threads that wait fetch what they begin it with.
void announce_product(const Matrix& matrix, int64_t num_rows, int32_t max_threads);

}  // namespace vllm::cpu
