// Attention of bf16 for narrow heads, which warpgroups do not multiply: see attention_bf16.cuh.

#include "attention_bf16.cuh"

BF16_ATTENTION(32, 4, 3, 64, 64, 64)
