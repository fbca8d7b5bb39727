// Every kernel.
#pragma once

#include "../allreduce.cu"
#include "../binary.cu"
#include "../cast.cu"
#include "../gather.cu"
#include "../gemm.cu"
#include "../images.cu"
#include "../ll128.cu"
#include "../mesh.cu"
#include "../move.cu"
#include "../pack.cu"
#include "../reduce.cu"
#include "../scale.cu"
#include "../sparse.cu"
#include "../sum.cu"
#include "../unary.cu"
#include "../widen.cu"
