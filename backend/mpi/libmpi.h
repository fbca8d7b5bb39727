//go:build mpi

/* The part of MPI that package mpi uses, opened at run time. */
#ifndef EURYALE_LIBMPI_H
#define EURYALE_LIBMPI_H

#include <stdint.h>

/*
 * A handle of any MPI. Those of Open MPI and of the standard ABI are pointers, those of MPICH are
 * ints. An int is passed in the lower half of the register or stack slot that a pointer has, and
 * stored in the lower half of the variable, on the processors that this is built for: amd64 and
 * arm64, both little-endian. So one prototype fits all.
 */
typedef uintptr_t euryale_handle;

enum { EURYALE_TYPES = 7, EURYALE_OPS = 4 };

/* What a call is; in the order of backend.Kind, from 1. */
enum {
	EURYALE_ALL_REDUCE = 1,
	EURYALE_REDUCE_SCATTER,
	EURYALE_ALL_GATHER,
	EURYALE_ALL_TO_ALL,
	EURYALE_BROADCAST,
	EURYALE_REDUCE,
	EURYALE_GATHER,
	EURYALE_SCATTER,
	EURYALE_EXCHANGE /* messages between each two ranks */
};

/*
 * An exchange cuts messages of up to EURYALE_CUT bytes into parts of EURYALE_PART: in shared
 * memory Open MPI copies less than 4 KiB at once, and waits for the receiver before it sends more.
 * From 16 KiB on whole messages are faster.
 */
enum {
	EURYALE_CUT = 8192,
	EURYALE_PART = 3072,
	EURYALE_PARTS = (EURYALE_CUT + EURYALE_PART - 1) / EURYALE_PART
};

/* A call. Counts and displacements are in elements. */
struct euryale_call {
	int32_t kind, type, op;
	int32_t root;	     /* this rank, of an exchange */
	int32_t count;	     /* of one even chunk, or of the whole operand; ranks of an exchange */
	int32_t begun, over; /* how many requests, of which the first ones are over */
	int32_t in_place;
	int32_t crowded; /* other ranks wait for this core */
	/* If they are there chunks are uneven, and count is this rank's. */
	const int32_t *sends, *send_at, *receives, *receive_at;
	void *dst;
	const void *src;
	euryale_handle comm;
	euryale_handle *requests; /* 1, or 2 * EURYALE_PARTS for each other rank */
};

/* The functions: each a field, its name in MPI, and its parameters. All return an int. */
#define EURYALE_MPI(X) \
	X(init_thread, Init_thread, (int *, char ***, int, int *)) \
	X(initialized, Initialized, (int *)) \
	X(finalize, Finalize, (void)) \
	X(get_library_version, Get_library_version, (char *, int *)) \
	X(error_string, Error_string, (int, char *, int *)) \
	X(comm_size, Comm_size, (euryale_handle, int *)) \
	X(comm_rank, Comm_rank, (euryale_handle, int *)) \
	X(comm_split, Comm_split, (euryale_handle, int, int, euryale_handle *)) \
	X(comm_free, Comm_free, (euryale_handle *)) \
	X(comm_set_errhandler, Comm_set_errhandler, (euryale_handle, euryale_handle)) \
	X(op_create, Op_create, (void (*)(void *, void *, int *, void *), int, euryale_handle *)) \
	X(test, Test, (euryale_handle *, int *, void *)) \
	X(isend, Isend, (const void *, int, euryale_handle, int, int, euryale_handle, \
		euryale_handle *)) \
	X(irecv, Irecv, (void *, int, euryale_handle, int, int, euryale_handle, euryale_handle *)) \
	X(iallreduce, Iallreduce, (const void *, void *, int, euryale_handle, euryale_handle, \
		euryale_handle, euryale_handle *)) \
	X(ireduce, Ireduce, (const void *, void *, int, euryale_handle, euryale_handle, int, \
		euryale_handle, euryale_handle *)) \
	X(ireduce_scatter_block, Ireduce_scatter_block, (const void *, void *, int, \
		euryale_handle, euryale_handle, euryale_handle, euryale_handle *)) \
	X(ireduce_scatter, Ireduce_scatter, (const void *, void *, const int *, \
		euryale_handle, euryale_handle, euryale_handle, euryale_handle *)) \
	X(ibcast, Ibcast, (void *, int, euryale_handle, int, euryale_handle, euryale_handle *)) \
	X(iallgather, Iallgather, (const void *, int, euryale_handle, void *, int, \
		euryale_handle, euryale_handle, euryale_handle *)) \
	X(iallgatherv, Iallgatherv, (const void *, int, euryale_handle, void *, const int *, \
		const int *, euryale_handle, euryale_handle, euryale_handle *)) \
	X(igather, Igather, (const void *, int, euryale_handle, void *, int, euryale_handle, \
		int, euryale_handle, euryale_handle *)) \
	X(igatherv, Igatherv, (const void *, int, euryale_handle, void *, const int *, \
		const int *, euryale_handle, int, euryale_handle, euryale_handle *)) \
	X(iscatter, Iscatter, (const void *, int, euryale_handle, void *, int, euryale_handle, \
		int, euryale_handle, euryale_handle *)) \
	X(iscatterv, Iscatterv, (const void *, const int *, const int *, euryale_handle, \
		void *, int, euryale_handle, int, euryale_handle, euryale_handle *)) \
	X(ialltoall, Ialltoall, (const void *, int, euryale_handle, void *, int, \
		euryale_handle, euryale_handle, euryale_handle *)) \
	X(ialltoallv, Ialltoallv, (const void *, const int *, const int *, euryale_handle, \
		void *, const int *, const int *, euryale_handle, euryale_handle, euryale_handle *))

struct euryale_mpi {
	void *library;
	const char *missing; /* the first function that is not there */
#define FIELD(field, name, parameters) int (*field) parameters;
	EURYALE_MPI(FIELD)
#undef FIELD

	/* Constants, which differ between implementations. */
	euryale_handle world, errors_return;
	euryale_handle types[EURYALE_TYPES]; /* see euryale_mpi_type */
	euryale_handle ops[EURYALE_OPS];     /* sum, product, minimum, maximum */
	euryale_handle own[EURYALE_TYPES][EURYALE_OPS]; /* reductions of ours, 0 where MPI's serve */
	void *in_place;
	int thread_multiple;
};

/* Families of implementations, by their constants. */
enum { EURYALE_ABI, EURYALE_OPEN_MPI, EURYALE_MPICH };

/* euryale_mpi_open opens a library, and returns why it cannot. */
const char *euryale_mpi_open(struct euryale_mpi *m, const char *path);
void euryale_mpi_close(struct euryale_mpi *m);
const char *euryale_mpi_path(struct euryale_mpi *m);

/* euryale_mpi_constants takes the constants of a family. It returns 0 if the library lacks them. */
int euryale_mpi_constants(struct euryale_mpi *m, int family);

/* These return what MPI does: 0 is success. text has room for 8192 bytes. */
int euryale_mpi_version(struct euryale_mpi *m, char *text);
int euryale_mpi_error(struct euryale_mpi *m, int code, char *text);

/* euryale_mpi_init begins MPI, and restores the signal handlers that MPI has replaced. */
int euryale_mpi_init(struct euryale_mpi *m, int *provided, int *rank, int *size);
int euryale_mpi_finalize(struct euryale_mpi *m);
int euryale_mpi_split(struct euryale_mpi *m, euryale_handle parent, int color, int key,
	euryale_handle *part);
int euryale_mpi_free(struct euryale_mpi *m, euryale_handle comm);

/*
 * euryale_mpi_start starts the struct euryale_call at an address, and tests it until polls tests
 * have found it under way; euryale_mpi_test tests it again. Go would look through the memory behind
 * a pointer each time.
 */
int euryale_mpi_start(struct euryale_mpi *m, uintptr_t at, int polls);
int euryale_mpi_test(struct euryale_mpi *m, uintptr_t at, int polls);

#endif
