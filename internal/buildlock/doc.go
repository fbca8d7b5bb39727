// Package buildlock is the lock that ranks in one process hold while they build graphs, which
// Gorgonia does one at a time. It ends the job with an error that says why, where a plain lock
// would make all wait for ever: a rank that waits for others while it holds the lock, which one
// of them needs to get there.
package buildlock
