package mpi

import "syscall"

// lossSignal stands for the signal that Windows does not have.
const lossSignal = syscall.SIGTERM
