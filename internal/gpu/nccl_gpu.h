/* NCCL, opened at run time, with prototypes of our own: the functions that are
 * used, as every version since 2.10 has them but for those said. */

#ifndef EURYALE_NCCL_H
#define EURYALE_NCCL_H

#include <stddef.h>
#include <stdint.h>
#include <cuda.h>

typedef struct ncclComm *euryale_comm;

/* Results. */
#define EURYALE_SUCCESS 0
#define EURYALE_CUDA 1
#define EURYALE_IN_PROGRESS 7

struct euryale_id {
	char bytes[128];
};

/* ncclConfig_t as of 2.18. Newer versions read as much as size says. */
struct euryale_config {
	size_t size;
	unsigned int magic;
	unsigned int version;
	int blocking;
	int cga_cluster_size;
	int min_ctas;
	int max_ctas;
	const char *net_name;
	int split_share;
};

/* ncclEncryptionConfig_t. */
struct euryale_encryption {
	size_t size;
	unsigned int magic;
	unsigned int version;
	int mode;
	const char *key;
};

struct euryale_nccl {
	void *handle;
	const char *missing; /* the first function that was not found */
	int (*get_version)(int *version);
	const char *(*get_error_string)(int result);
	const char *(*get_last_error)(euryale_comm comm); /* since 2.13, else NULL */
	int (*get_unique_id)(struct euryale_id *id);
	int (*comm_init_rank)(euryale_comm *comm, int size, struct euryale_id id, int rank);
	/* These two since 2.14 and 2.18, else NULL. */
	int (*comm_init_rank_config)(euryale_comm *comm, int size, struct euryale_id id, int rank,
		struct euryale_config *config);
	int (*comm_split)(euryale_comm comm, int color, int key, euryale_comm *part,
		struct euryale_config *config);
	int (*set_encryption)(const struct euryale_encryption *config); /* since 2.32, else NULL */
	int (*comm_destroy)(euryale_comm comm);
	int (*comm_abort)(euryale_comm comm);
	int (*comm_get_async_error)(euryale_comm comm, int *result);
	int (*group_start)(void);
	int (*group_end)(void);
	int (*all_reduce)(const void *src, void *dst, size_t n, int type, int op, euryale_comm comm,
		CUstream stream);
	int (*reduce_scatter)(const void *src, void *dst, size_t n, int type, int op, euryale_comm comm,
		CUstream stream);
	int (*all_gather)(const void *src, void *dst, size_t n, int type, euryale_comm comm,
		CUstream stream);
	int (*broadcast)(const void *src, void *dst, size_t n, int type, int root, euryale_comm comm,
		CUstream stream);
	int (*reduce)(const void *src, void *dst, size_t n, int type, int op, int root,
		euryale_comm comm, CUstream stream);
	int (*send)(const void *src, size_t n, int type, int peer, euryale_comm comm, CUstream stream);
	int (*recv)(void *dst, size_t n, int type, int peer, euryale_comm comm, CUstream stream);
};

/* One rank's communicators. NCCL writes here in the background, so it is not
 * memory of Go. */
struct euryale_pair {
	euryale_comm root; /* does not block: connects and splits; NULL where NCCL cannot split */
	euryale_comm fast; /* blocks, as long as it takes to start a kernel: collectives */
};

/* As in library.go. */
struct euryale_step {
	int32_t what;
	int32_t peer;
	int32_t dtype;
	int32_t op;
	uintptr_t src;
	uintptr_t dst;
	uint64_t count;
};

enum {
	EURYALE_COPY,
	EURYALE_SEND,
	EURYALE_RECV,
	EURYALE_ALL_REDUCE,
	EURYALE_REDUCE_SCATTER,
	EURYALE_ALL_GATHER,
	EURYALE_BROADCAST,
	EURYALE_REDUCE,
};

/* A result of NCCL, and one of the driver if that is what failed. */
struct euryale_result {
	int nccl;
	int cuda;
};

/* euryale_nccl_open returns NULL, or why path cannot be opened. */
const char *euryale_nccl_open(struct euryale_nccl *n, const char *path);
void euryale_nccl_close(struct euryale_nccl *n);

/* euryale_nccl_path returns the file that holds the library, until it is closed. */
const char *euryale_nccl_path(struct euryale_nccl *n);

int euryale_nccl_version(struct euryale_nccl *n, int *version);
const char *euryale_nccl_error(struct euryale_nccl *n, int result);
const char *euryale_nccl_last_error(struct euryale_nccl *n);

/*
 * euryale_nccl_encrypt has the sockets of later communicators encrypted by a key of 32 bytes or
 * more. euryale_nccl_encrypts says whether the library has a function for that.
 */
int euryale_nccl_encrypts(const struct euryale_nccl *n);
int euryale_nccl_encrypt(struct euryale_nccl *n, const char *key);

int euryale_nccl_id(struct euryale_nccl *n, struct euryale_id *id);
int euryale_nccl_join(struct euryale_nccl *n, struct euryale_pair *p, int size,
	const struct euryale_id *id, int rank);
int euryale_nccl_join_blocking(struct euryale_nccl *n, struct euryale_pair *p, int size,
	const struct euryale_id *id, int rank);
int euryale_nccl_splits(const struct euryale_nccl *n);
int euryale_nccl_fork(struct euryale_nccl *n, euryale_comm parent, int color, int key,
	euryale_comm *part, int blocking);
int euryale_nccl_state(struct euryale_nccl *n, euryale_comm comm);
int euryale_nccl_destroy(struct euryale_nccl *n, euryale_comm comm);
int euryale_nccl_abort(struct euryale_nccl *n, euryale_comm comm);

/* euryale_nccl_run starts steps on a stream, as one group if they are several,
 * and then records event if it is not 0. */
struct euryale_result euryale_nccl_run(struct euryale_nccl *n, euryale_comm comm,
	const struct euryale_step *steps, int count, uintptr_t stream, uintptr_t event);

#endif
