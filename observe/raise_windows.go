package observe

import "syscall"

// raise does nothing: nobody can have sent the signal before.
func raise(syscall.Signal) {}
