//go:build unix

package filelock

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// NoFollow is the flag of os.OpenFile that refuses a symbolic link.
const NoFollow = unix.O_NOFOLLOW

// TryLock locks a file until it is closed, or the process ends. The error wraps ErrHeld if another
// open file has the lock.
func TryLock(f *os.File) error {
	for {
		switch err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err {
		case unix.EINTR:
		case unix.EWOULDBLOCK:
			return ErrHeld
		case unix.ENOSYS, unix.ENOLCK, unix.EOPNOTSUPP:
			return fmt.Errorf("%w: %w", ErrUnsupported, err)
		default:
			return err
		}
	}
}

// Remove closes a locked file that remove removes: before, so that nobody locks a file without a
// name.
func Remove(f *os.File, remove func() error) error { return errors.Join(remove(), f.Close()) }
