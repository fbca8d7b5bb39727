// Package straggler says which rank of a job is late, and why.
//
// Ranks wait for each other in collectives, so all of them take the time of the slowest. A [Sample]
// has what a rank did in a step: how long it was busy, how long it was blocked in collectives, and
// what it has noted of the causes for which a rank may be late. A [Tally] adds up the samples of
// all ranks, which are the same on all of them, so all come to the same [Verdict]. No clocks are
// compared: a step begins, on all ranks, when they have exchanged the samples of the step before.
//
// [Process] notes what the Go runtime and the system tell of this process: collections of garbage,
// page faults, threads that waited for a core, limits of cgroups, throttled clocks, and stops by a
// signal. Who trains notes the others.
package straggler
