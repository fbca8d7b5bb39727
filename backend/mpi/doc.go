// Package mpi runs collectives on MPI, on clusters whose network MPI knows best. It needs build tag
// mpi, and an MPI library at run time:
//
//	go build -tags mpi ./...
//	EURYALE_BACKEND=mpi mpirun -n 4 PROGRAM
//
// # Which library
//
// The library is opened at run time, and no header is needed to build: EURYALE_MPI names it, or it
// is the first of libmpi_abi.so (the standard ABI of MPI 5), Open MPI's libmpi.so.40, and MPICH's
// libmpi.so.12, whose ABI Intel MPI, MVAPICH and Cray MPICH have, too. Where the variables of
// mpirun or mpiexec tell whose launcher it was, that implementation comes first. Launcher and
// library must be of one implementation: a foreign library makes a world of one rank of each
// process, and Connect says so.
//
// # Calls
//
// A collective is a non-blocking one of MPI, or messages, tested until they are done, so that a
// wait can end: by a lost rank, Abort, Close or the timeout. MPI keeps an abandoned call, so the
// call's buffers stay allocated until the process ends.
//
// An all-reduce among up to 8 ranks of one machine, and among more from 2 KiB a rank on, is
// messages: the ranks send each other their operands, or, where that is more than 32 KiB, a chunk
// of them, of which they add up what they get and send the sums. MPI_Iallreduce takes Open MPI 4
// longer, and from 8 KiB on MPI_Allreduce, too.
//
// The ranks of one machine show each other their calls on a board in shared memory, as everywhere,
// and enter MPI once all have begun the same call. So calls that differ, and ranks that do not
// come, are found before MPI knows of the call. On several machines calls are compared by an
// all-gather before each one (see euryale.Init).
//
// All ranks have bitwise identical results. Those of all-reduces by messages are package host's;
// other sums are in MPI's own order, and only exact ones have the bits of package host. 16-bit
// floats are reduced as F32 and rounded once.
//
// # One world
//
// MPI begins once in a process and ends once: [Backend.Close] ends it. All ranks call that, and MPI
// waits for the last one there. After a failure MPI is not ended, since it would wait for the rank
// that is lost.
package mpi
