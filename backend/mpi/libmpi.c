//go:build mpi

#define _GNU_SOURCE /* dladdr */
#include "libmpi.h"

#include <dlfcn.h>
#include <math.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <string.h>

/* look finds one function, and remembers the first that is not there. */
static void *look(struct euryale_mpi *m, const char *name)
{
	void *f = dlsym(m->library, name);

	if (f == NULL && m->missing == NULL)
		m->missing = name;
	return f;
}

const char *euryale_mpi_open(struct euryale_mpi *m, const char *path)
{
	memset(m, 0, sizeof *m);
	/* Global, because the plugins of Open MPI 4 look for its symbols there. */
	m->library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
	if (m->library == NULL) {
		const char *why = dlerror();
		return why != NULL ? why : "unknown error";
	}
#define LOOK(field, name, parameters) m->field = look(m, "MPI_" #name);
	EURYALE_MPI(LOOK)
#undef LOOK
	return NULL;
}

void euryale_mpi_close(struct euryale_mpi *m)
{
	dlclose(m->library);
	m->library = NULL;
}

const char *euryale_mpi_path(struct euryale_mpi *m)
{
	Dl_info info;

	if (dladdr((void *)m->init_thread, &info) == 0 || info.dli_fname == NULL)
		return "";
	return info.dli_fname;
}

/* Types are in the order of backend.DType from 1; 16-bit floats are moved, not computed with. */
static const char *const open_types[EURYALE_TYPES] = {
	"ompi_mpi_uint16_t", "ompi_mpi_uint16_t", "ompi_mpi_float", "ompi_mpi_double",
	"ompi_mpi_int32_t", "ompi_mpi_int64_t", "ompi_mpi_uint8_t",
};
static const char *const open_ops[EURYALE_OPS] = {"ompi_mpi_op_sum", "ompi_mpi_op_prod",
	"ompi_mpi_op_min", "ompi_mpi_op_max"};

static int open_mpi(struct euryale_mpi *m)
{
	int all = 1;

	/* Handles are the addresses of exported objects. */
	all &= (m->world = (euryale_handle)dlsym(m->library, "ompi_mpi_comm_world")) != 0;
	all &= (m->errors_return = (euryale_handle)dlsym(m->library, "ompi_mpi_errors_return")) != 0;
	for (int i = 0; i < EURYALE_TYPES; i++)
		all &= (m->types[i] = (euryale_handle)dlsym(m->library, open_types[i])) != 0;
	for (int i = 0; i < EURYALE_OPS; i++)
		all &= (m->ops[i] = (euryale_handle)dlsym(m->library, open_ops[i])) != 0;
	m->in_place = (void *)1;
	m->thread_multiple = 3;
	return all;
}

static int numbered(struct euryale_mpi *m, euryale_handle world, euryale_handle errors_return,
	const euryale_handle *types, const euryale_handle *ops, void *in_place, int thread_multiple) {
	m->world = world;
	m->errors_return = errors_return;
	memcpy(m->types, types, sizeof m->types);
	memcpy(m->ops, ops, sizeof m->ops);
	m->in_place = in_place;
	m->thread_multiple = thread_multiple;
	return 1;
}

int euryale_mpi_constants(struct euryale_mpi *m, int family)
{
	/* MPI 5.0, chapter 20. */
	static const euryale_handle abi_types[] = {0x249, 0x249, 0x210, 0x214, 0x250, 0x258, 0x241};
	static const euryale_handle abi_ops[] = {0x21, 0x24, 0x22, 0x23};
	/* mpi.h of MPICH 3 and later, which share their ABI with Intel MPI, MVAPICH and Cray MPICH. */
	static const euryale_handle mpich_types[] = {0x4c00023c, 0x4c00023c, 0x4c00040a, 0x4c00080b,
		0x4c000439, 0x4c00083a, 0x4c00013b};
	static const euryale_handle mpich_ops[] = {0x58000003, 0x58000004, 0x58000002, 0x58000001};

	switch (family) {
	case EURYALE_ABI:
		return numbered(m, 0x101, 0x143, abi_types, abi_ops, (void *)1, 4096);
	case EURYALE_MPICH:
		return numbered(m, 0x44000000, 0x54000001, mpich_types, mpich_ops, (void *)-1, 3);
	}
	return open_mpi(m);
}

int euryale_mpi_version(struct euryale_mpi *m, char *text)
{
	int n;

	return m->get_library_version(text, &n);
}

int euryale_mpi_error(struct euryale_mpi *m, int code, char *text)
{
	int n;

	return m->error_string(code, text, &n);
}

/*
 * MPI's own minimum and maximum say nothing about NaN and -0. These do as backend.ReduceOp says:
 * NaN wins, and -0 is less than +0.
 */
#define EXTREMUM(name, type, order, zero)                                  \
	static void name(void *in, void *inout, int *n, void *unused)      \
	{                                                                  \
		const type *x = in;                                        \
		type *y = inout;                                           \
                                                                           \
		(void)unused;                                              \
		for (int i = 0; i < *n; i++)                               \
			if (x[i] != x[i] || x[i] order y[i] || (x[i] == y[i] && signbit(zero[i]))) \
				y[i] = x[i];                               \
	}

EXTREMUM(min_f32, float, <, x)
EXTREMUM(max_f32, float, >, y)
EXTREMUM(min_f64, double, <, x)
EXTREMUM(max_f64, double, >, y)

/*
 * Bytes are not in good hands: sums of Open MPI 4.1 stop at 255 where the processor has AVX, and
 * MPICH 4.0 has minima and maxima of signed ones.
 */
#define BYTES(name, result)                                                \
	static void name(void *in, void *inout, int *n, void *unused)      \
	{                                                                  \
		const uint8_t *x = in;                                     \
		uint8_t *y = inout;                                        \
                                                                           \
		(void)unused;                                              \
		for (int i = 0; i < *n; i++)                               \
			y[i] = result;                                     \
	}

BYTES(sum_u8, x[i] + y[i])
BYTES(prod_u8, x[i] * y[i])
BYTES(min_u8, x[i] < y[i] ? x[i] : y[i])
BYTES(max_u8, x[i] > y[i] ? x[i] : y[i])

/* The indices of backend.DType, from 1. */
enum { F32 = 3, F64 = 4, U8 = 7 };

typedef void function(void *, void *, int *, void *);

static function *const own[EURYALE_TYPES][EURYALE_OPS] = {
	[F32 - 1] = {NULL, NULL, min_f32, max_f32},
	[F64 - 1] = {NULL, NULL, min_f64, max_f64},
	[U8 - 1] = {sum_u8, prod_u8, min_u8, max_u8},
};

static int create_own(struct euryale_mpi *m)
{
	int code = 0;

	for (int type = 0; type < EURYALE_TYPES; type++)
		for (int op = 0; op < EURYALE_OPS; op++)
			if (own[type][op] != NULL && code == 0)
				code = m->op_create(own[type][op], 1, &m->own[type][op]);
	return code;
}

int euryale_mpi_init(struct euryale_mpi *m, int *provided, int *rank, int *size)
{
	struct sigaction before[NSIG];
	int code;

	for (int s = 1; s < NSIG; s++)
		sigaction(s, NULL, &before[s]);
	code = m->init_thread(NULL, NULL, m->thread_multiple, provided);
	for (int s = 1; s < NSIG; s++) /* those of Go, without which a fault or a signal would end it */
		sigaction(s, &before[s], NULL);
	if (code == 0)
		code = m->comm_set_errhandler(m->world, m->errors_return);
	if (code == 0)
		code = m->comm_rank(m->world, rank);
	if (code == 0)
		code = m->comm_size(m->world, size);
	return code != 0 ? code : create_own(m);
}

int euryale_mpi_finalize(struct euryale_mpi *m)
{
	int code = m->finalize();

	/*
	 * MPICH 5 tells its launcher from a handler of exit(), which Go programs never call, and the
	 * launcher kills the job of a rank that does not. To close the library runs its handlers.
	 */
	if (code == 0)
		euryale_mpi_close(m);
	return code;
}

int euryale_mpi_split(struct euryale_mpi *m, euryale_handle parent, int color, int key,
	euryale_handle *part) {
	const int undefined = -32766; /* of every family */
	int code = m->comm_split(parent, color < 0 ? undefined : color, key, part);

	if (code == 0 && color >= 0)
		code = m->comm_set_errhandler(*part, m->errors_return);
	return code;
}

int euryale_mpi_free(struct euryale_mpi *m, euryale_handle comm) { return m->comm_free(&comm); }

static euryale_handle op_of(struct euryale_mpi *m, struct euryale_call *c)
{
	euryale_handle op = m->own[c->type - 1][c->op];

	return op != 0 ? op : m->ops[c->op];
}

/* message begins to receive from a rank, or to send to it: all of its parts. */
static int message(struct euryale_mpi *m, struct euryale_call *c, int receive, int rank)
{
	int n = receive ? c->receives[rank] : c->sends[rank],
		at = receive ? c->receive_at[rank] : c->send_at[rank];
	int most = n <= EURYALE_CUT ? EURYALE_PART : n, code = 0;
	euryale_handle type = m->types[c->type - 1];

	for (int end = at + n; at < end && code == 0; at += most) {
		euryale_handle *request = &c->requests[c->begun++];
		int part = end - at < most ? end - at : most;

		code = receive ? m->irecv((char *)c->dst + at, part, type, rank, 0, c->comm, request)
			       : m->isend((const char *)c->src + at, part, type, rank, 0, c->comm, request);
	}
	return code;
}

/* exchange begins an exchange of bytes. */
static int exchange(struct euryale_mpi *m, struct euryale_call *c)
{
	int code = 0;

	for (int receive = 1; receive >= 0; receive--)
		for (int i = 1; i < c->count && code == 0; i++)
			code = message(m, c, receive, (c->root + i) % c->count);
	return code;
}

static int start(struct euryale_mpi *m, struct euryale_call *c)
{
	euryale_handle type = m->types[c->type - 1];
	const void *src = c->in_place ? m->in_place : c->src;
	void *dst = c->in_place ? m->in_place : c->dst;
	int n = c->count, uneven = c->sends != NULL;
	euryale_handle *request = c->requests;

	if (c->kind == EURYALE_EXCHANGE)
		return exchange(m, c);
	c->begun = 1;
	switch (c->kind) {
	case EURYALE_ALL_REDUCE:
		return m->iallreduce(src, c->dst, n, type, op_of(m, c), c->comm, request);
	case EURYALE_REDUCE:
		return m->ireduce(src, c->dst, n, type, op_of(m, c), c->root, c->comm, request);
	case EURYALE_REDUCE_SCATTER:
		if (uneven)
			return m->ireduce_scatter(src, c->dst, c->receives, type, op_of(m, c), c->comm,
				request);
		return m->ireduce_scatter_block(src, c->dst, n, type, op_of(m, c), c->comm, request);
	case EURYALE_BROADCAST:
		return m->ibcast(c->dst, n, type, c->root, c->comm, request);
	case EURYALE_ALL_GATHER:
		if (uneven)
			return m->iallgatherv(src, n, type, c->dst, c->receives, c->receive_at, type, c->comm,
				request);
		return m->iallgather(src, n, type, c->dst, n, type, c->comm, request);
	case EURYALE_GATHER:
		if (uneven)
			return m->igatherv(src, n, type, c->dst, c->receives, c->receive_at, type, c->root,
				c->comm, request);
		return m->igather(src, n, type, c->dst, n, type, c->root, c->comm, request);
	case EURYALE_SCATTER:
		if (uneven)
			return m->iscatterv(c->src, c->sends, c->send_at, type, dst, n, type, c->root, c->comm,
				request);
		return m->iscatter(c->src, n, type, dst, n, type, c->root, c->comm, request);
	}
	if (uneven)
		return m->ialltoallv(c->src, c->sends, c->send_at, type, c->dst, c->receives, c->receive_at,
			type, c->comm, request);
	return m->ialltoall(c->src, n, type, c->dst, n, type, c->comm, request);
}

int euryale_mpi_test(struct euryale_mpi *m, uintptr_t at, int polls)
{
	struct euryale_call *c = (struct euryale_call *)at;
	/* Nobody reads it, since errors are what MPI_Test returns: it only has to be large enough. The
	 * largest is the one of the standard ABI, with 32 bytes. */
	uint64_t status[8];
	int code = 0;

	for (int i = 0; i < polls && c->over < c->begun && code == 0;) {
		int done = 0;

		code = m->test(&c->requests[c->over], &done, status);
		c->over += done;
		i += !done;
		if (!done && c->crowded)
			sched_yield();
	}
	return code;
}

int euryale_mpi_start(struct euryale_mpi *m, uintptr_t at, int polls)
{
	int code = start(m, (struct euryale_call *)at);

	return code != 0 ? code : euryale_mpi_test(m, at, polls);
}
