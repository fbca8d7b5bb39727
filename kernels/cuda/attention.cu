// Attention on ordinary cores: see attention.cuh.

#include "attention.cuh"

PLAIN_ATTENTION(64, f64, f64, 2)
PLAIN_ATTENTION(256, f64, f64, 2)
PLAIN_ATTENTION(64, f32, f32, 4)
PLAIN_ATTENTION(128, f32, f32, 4)
PLAIN_ATTENTION(256, f32, f32, 4)
PLAIN_ATTENTION(256, bf16, f32, 4)
