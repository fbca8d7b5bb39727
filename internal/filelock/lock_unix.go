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
func TryLock(f *os.File) error { return lock(f, unix.LOCK_EX) }

// TryShare is TryLock for a lock that any number of open files may have, if none has TryLock's.
func TryShare(f *os.File) error { return lock(f, unix.LOCK_SH) }

func lock(f *os.File, how int) error {
	for {
		switch err := unix.Flock(int(f.Fd()), how|unix.LOCK_NB); err {
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
