//go:build !linux

package proctest

import (
	"errors"
	"os"
	"syscall"
)

// errLinux is why there are no machines.
var errLinux = errors.New("network namespaces are Linux's")

// StderrToStdout does nothing here.
func StderrToStdout() {}

func kill(int, syscall.Signal) error { return errLinux }

func mountMemory(string) error { return errLinux }

func unmount(string) error { return errLinux }

func newTap(string, string) (*os.File, error) { return nil, errLinux }

// portLater does nothing: only storms among namespaces need it.
func portLater(string, string, syscall.RawConn) error { return nil }
