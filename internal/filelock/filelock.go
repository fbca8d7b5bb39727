// Package filelock locks files against other processes, by flock or by Windows' LockFileEx.
package filelock

import "errors"

// ErrHeld says that another holds the lock.
var ErrHeld = errors.New("the file is locked")

// ErrUnsupported says that the file system has no locks.
var ErrUnsupported = errors.New("the file system has no locks")
