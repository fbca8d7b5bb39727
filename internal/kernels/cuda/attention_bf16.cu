// Attention of bf16: see attention_bf16.cuh.

#include "attention_bf16.cuh"

BF16_ATTENTION(64, 4, 3, 64, 64, 32)
BF16_ATTENTION(128, 3, 2, 32, 32, 16)
