//go:build unix

package mpi

import "syscall"

// lossSignal is how Hydra tells ranks that another one has died.
const lossSignal = syscall.SIGUSR1
