//go:build gpu

#define _GNU_SOURCE /* dladdr */
#include "nccl_gpu.h"

#include <dlfcn.h>
#include <limits.h>
#include <string.h>

/* look finds one function, and remembers the first that is not there. */
static void *look(struct euryale_nccl *n, const char *name)
{
	void *f = dlsym(n->handle, name);

	if (f == NULL && n->missing == NULL)
		n->missing = name;
	return f;
}

const char *euryale_nccl_open(struct euryale_nccl *n, const char *path)
{
	memset(n, 0, sizeof *n);
	n->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (n->handle == NULL) {
		const char *why = dlerror();
		return why != NULL ? why : "unknown error";
	}
	n->get_version = look(n, "ncclGetVersion");
	n->get_error_string = look(n, "ncclGetErrorString");
	n->get_last_error = dlsym(n->handle, "ncclGetLastError");
	n->get_unique_id = look(n, "ncclGetUniqueId");
	n->comm_init_rank = look(n, "ncclCommInitRank");
	n->comm_init_rank_config = dlsym(n->handle, "ncclCommInitRankConfig");
	n->comm_split = dlsym(n->handle, "ncclCommSplit");
	n->set_encryption = dlsym(n->handle, "ncclSetEncryption");
	n->comm_destroy = look(n, "ncclCommDestroy");
	n->comm_abort = look(n, "ncclCommAbort");
	n->comm_get_async_error = look(n, "ncclCommGetAsyncError");
	n->group_start = look(n, "ncclGroupStart");
	n->group_end = look(n, "ncclGroupEnd");
	n->all_reduce = look(n, "ncclAllReduce");
	n->reduce_scatter = look(n, "ncclReduceScatter");
	n->all_gather = look(n, "ncclAllGather");
	n->broadcast = look(n, "ncclBroadcast");
	n->reduce = look(n, "ncclReduce");
	n->send = look(n, "ncclSend");
	n->recv = look(n, "ncclRecv");
	return NULL;
}

void euryale_nccl_close(struct euryale_nccl *n)
{
	dlclose(n->handle);
	n->handle = NULL;
}

const char *euryale_nccl_path(struct euryale_nccl *n)
{
	Dl_info info;

	if (dladdr((void *)n->get_version, &info) == 0 || info.dli_fname == NULL)
		return "";
	return info.dli_fname;
}

int euryale_nccl_version(struct euryale_nccl *n, int *version)
{
	return n->get_version(version);
}

const char *euryale_nccl_error(struct euryale_nccl *n, int result)
{
	return n->get_error_string(result);
}

const char *euryale_nccl_last_error(struct euryale_nccl *n)
{
	return n->get_last_error != NULL ? n->get_last_error(NULL) : "";
}

int euryale_nccl_id(struct euryale_nccl *n, struct euryale_id *id)
{
	return n->get_unique_id(id);
}

enum { MAGIC = 0xcafebeef };

int euryale_nccl_encrypts(const struct euryale_nccl *n)
{
	return n->set_encryption != NULL;
}

int euryale_nccl_encrypt(struct euryale_nccl *n, const char *key)
{
	struct euryale_encryption e = {
		.size = sizeof e,
		.magic = MAGIC,
		.version = 23200, /* whose structure this is */
		.mode = 1, /* by a key that all ranks have */
		.key = key,
	};

	return n->set_encryption(&e);
}

/* Newer versions take what they know of from here, by the version, and the rest
 * as not set. */
static struct euryale_config config(int blocking)
{
	struct euryale_config c = {
		.size = sizeof c,
		.magic = MAGIC,
		.version = 21800, /* whose structure this is */
		.blocking = blocking,
		.cga_cluster_size = INT_MIN,
		.min_ctas = INT_MIN,
		.max_ctas = INT_MIN,
		.net_name = NULL,
		.split_share = INT_MIN,
	};
	return c;
}

int euryale_nccl_join(struct euryale_nccl *n, struct euryale_pair *p, int size,
	const struct euryale_id *id, int rank) {
	struct euryale_config c = config(0);

	return n->comm_init_rank_config(&p->root, size, *id, rank, &c);
}

int euryale_nccl_join_blocking(struct euryale_nccl *n, struct euryale_pair *p, int size,
	const struct euryale_id *id, int rank) {
	return n->comm_init_rank(&p->fast, size, *id, rank);
}

int euryale_nccl_splits(const struct euryale_nccl *n)
{
	return n->comm_init_rank_config != NULL && n->comm_split != NULL;
}

int euryale_nccl_fork(struct euryale_nccl *n, euryale_comm parent, int color, int key,
	euryale_comm *part, int blocking) {
	struct euryale_config c = config(blocking);

	return n->comm_split(parent, color, key, part, &c);
}

int euryale_nccl_state(struct euryale_nccl *n, euryale_comm comm)
{
	int state = EURYALE_SUCCESS;
	int result = n->comm_get_async_error(comm, &state);

	return result != EURYALE_SUCCESS ? result : state;
}

int euryale_nccl_destroy(struct euryale_nccl *n, euryale_comm comm)
{
	return n->comm_destroy(comm);
}

int euryale_nccl_abort(struct euryale_nccl *n, euryale_comm comm)
{
	return n->comm_abort(comm);
}

/* one starts one step. */
static struct euryale_result one(struct euryale_nccl *n, euryale_comm comm,
	const struct euryale_step *s, CUstream stream) {
	const void *src = (const void *)s->src;
	void *dst = (void *)s->dst;
	struct euryale_result r = {EURYALE_SUCCESS, CUDA_SUCCESS};

	switch (s->what) {
	case EURYALE_COPY:
		r.cuda = cuMemcpyDtoDAsync(s->dst, s->src, s->count, stream);
		break;
	case EURYALE_SEND:
		r.nccl = n->send(src, s->count, s->dtype, s->peer, comm, stream);
		break;
	case EURYALE_RECV:
		r.nccl = n->recv(dst, s->count, s->dtype, s->peer, comm, stream);
		break;
	case EURYALE_ALL_REDUCE:
		r.nccl = n->all_reduce(src, dst, s->count, s->dtype, s->op, comm, stream);
		break;
	case EURYALE_REDUCE_SCATTER:
		r.nccl = n->reduce_scatter(src, dst, s->count, s->dtype, s->op, comm, stream);
		break;
	case EURYALE_ALL_GATHER:
		r.nccl = n->all_gather(src, dst, s->count, s->dtype, comm, stream);
		break;
	case EURYALE_BROADCAST:
		r.nccl = n->broadcast(src, dst, s->count, s->dtype, s->peer, comm, stream);
		break;
	case EURYALE_REDUCE:
		r.nccl = n->reduce(src, dst, s->count, s->dtype, s->op, s->peer, comm, stream);
		break;
	}
	return r;
}

static int failed(struct euryale_result r)
{
	return r.nccl != EURYALE_SUCCESS || r.cuda != CUDA_SUCCESS;
}

/* A group that was begun is ended whatever happens: else the thread's next call
 * would wait for ever inside it. */
static struct euryale_result group(struct euryale_nccl *n, euryale_comm comm,
	const struct euryale_step *steps, int count, CUstream stream) {
	struct euryale_result r = {n->group_start(), CUDA_SUCCESS};
	int i, end;

	if (failed(r))
		return r;
	for (i = 0; i < count && !failed(r); i++)
		r = one(n, comm, &steps[i], stream);
	end = n->group_end();
	if (!failed(r))
		r.nccl = end;
	return r;
}

struct euryale_result euryale_nccl_run(struct euryale_nccl *n, euryale_comm comm,
	const struct euryale_step *steps, int count, uintptr_t stream, uintptr_t event) {
	struct euryale_result r = {EURYALE_SUCCESS, CUDA_SUCCESS};
	CUstream s = (CUstream)stream;

	if (count == 1)
		r = one(n, comm, steps, s);
	else if (count > 1)
		r = group(n, comm, steps, count, s);
	if (!failed(r) && event != 0)
		r.cuda = cuEventRecord((CUevent)event, s);
	return r;
}
