// What other parts of the library may ask of products, beside the products themselves (api.h).
#pragma once

#include <cstdint>

#include "api.h"

namespace vllm::cpu {

// vllm_linear with the weights as a matrix.
int32_t multiply(const float* x, int64_t x_stride, int64_t num_rows, const Matrix& matrix, int32_t num_threads,
                 float* output, int64_t output_stride);

// From so many rows of x on, transposing the weights costs less than a twentieth of using them.
inline constexpr int64_t kManyRows = 192;

// output = activation(gates) * up for the product of x, [num_rows, size], with a matrix of as many columns of gates as
// of up. Fewer than kManyRows rows leave the product itself in `gate_up`; of more it is never written.
int32_t multiply_and_gate(const float* x, int64_t num_rows, const Matrix& gate_up_weights, int32_t activation,
                          int32_t num_threads, float* gate_up, float* output);

// Says that this product of `num_rows` rows is the team's next one: threads that wait fetch what they begin it with.
void announce_product(const Matrix& matrix, int64_t num_rows, int32_t max_threads);

}  // namespace vllm::cpu
