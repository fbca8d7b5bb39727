/* The CUDA driver API as gorgonia.org/cu knows it.
 *
 * CUDA 13 gave some calls new parameters. libcuda still exports the older
 * entry points, but the header hides them; this one, found first on the include
 * path, brings them back. With CUDA 12 it changes nothing. */

#include_next <cuda.h>

#ifndef EURYALE_CUDA_H
#define EURYALE_CUDA_H

#if CUDA_VERSION >= 13000

#undef cuCtxCreate
#undef cuMemAdvise
#undef cuMemPrefetchAsync
#undef cuGraphAddDependencies
#undef cuGraphGetEdges

#define cuCtxCreate cuCtxCreate_v2

#ifdef __cplusplus
extern "C" {
#endif

CUresult CUDAAPI cuCtxCreate(CUcontext *ctx, unsigned int flags, CUdevice dev);
CUresult CUDAAPI cuMemAdvise(CUdeviceptr ptr, size_t count, CUmem_advise advice, CUdevice dev);
CUresult CUDAAPI cuMemPrefetchAsync(CUdeviceptr ptr, size_t count, CUdevice dev, CUstream stream);
CUresult CUDAAPI cuGraphAddDependencies(CUgraph graph, const CUgraphNode *from,
	const CUgraphNode *to, size_t n);
CUresult CUDAAPI cuGraphGetEdges(CUgraph graph, CUgraphNode *from, CUgraphNode *to, size_t *n);

#ifdef __cplusplus
}
#endif

#endif /* CUDA_VERSION >= 13000 */
#endif
