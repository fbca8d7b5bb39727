package filelock

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/windows"
)

// NoFollow is the flag of os.OpenFile that refuses a symbolic link: Windows has none.
const NoFollow = 0

// TryLock locks a file until it is closed, or the process ends. The error wraps ErrHeld if another
// open file has the lock. It is on a byte far behind the content: nobody else can read what Windows
// has locked.
func TryLock(f *os.File) error { return lock(f, windows.LOCKFILE_EXCLUSIVE_LOCK) }

// TryShare is TryLock for a lock that any number of open files may have, if none has TryLock's.
func TryShare(f *os.File) error { return lock(f, 0) }

func lock(f *os.File, how uint32) error {
	at := windows.Overlapped{OffsetHigh: 1 << 30}
	how |= windows.LOCKFILE_FAIL_IMMEDIATELY
	err := windows.LockFileEx(windows.Handle(f.Fd()), how, 0, 1, 0, &at)
	switch {
	case errors.Is(err, windows.ERROR_LOCK_VIOLATION), errors.Is(err, windows.ERROR_IO_PENDING):
		return ErrHeld
	case errors.Is(err, windows.ERROR_NOT_SUPPORTED),
		errors.Is(err, windows.ERROR_INVALID_FUNCTION):
		return fmt.Errorf("%w: %w", ErrUnsupported, err)
	}
	return err
}

// Remove closes a locked file that remove removes: afterwards, since Windows keeps open files. One
// that another process has opened in between stays.
func Remove(f *os.File, remove func() error) error { return errors.Join(f.Close(), remove()) }
