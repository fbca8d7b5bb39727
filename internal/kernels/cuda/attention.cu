// Attention on ordinary cores: see attention.cuh.

#include "attention.cuh"

// Heads with a cap or a mask run by those of `true`.
PLAIN_ATTENTION(64, f64, f64, false, 1, 2)
PLAIN_ATTENTION(256, f64, f64, true, 1, 2)
PLAIN_ATTENTION(64, f32, f32, true, 3, 4)
PLAIN_ATTENTION(128, f32, f32, true, 3, 4)
PLAIN_ATTENTION(256, f32, f32, true, 1, 4)
PLAIN_ATTENTION(256, bf16, f32, true, 1, 4)
