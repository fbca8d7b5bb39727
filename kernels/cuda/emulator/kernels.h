// Every kernel.
#pragma once

#include "../allreduce.cu"
#include "../attention.cu"
#include "../attention_bf16.cu"
#include "../cast.cu"
#include "../convolve.cu"
#include "../divide.cu"
#include "../gather.cu"
#include "../gemm.cu"
#include "../images.cu"
#include "../ll128.cu"
#include "../mesh.cu"
#include "../move.cu"
#include "../reduce.cu"
#include "../rows.cu"
#include "../sparse.cu"
#include "../widen.cu"
