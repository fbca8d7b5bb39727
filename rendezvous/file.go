package rendezvous

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// The file store looks again after lookFirst, then half as often each time, up
// to lookLast.
const (
	lookFirst = time.Millisecond
	lookLast  = 50 * time.Millisecond
)

// fileStore keeps each value in a file, and changes files under one lock.
type fileStore struct {
	dir    string
	closed context.Context
	close  context.CancelCauseFunc
}

// NewFileStore returns the store in a directory that all ranks see, on one machine or on a
// shared file system with working locks. It is for ranks without a network. It creates the
// directory if necessary. The directory belongs to one job, which removes it when all ranks
// are done. Reads poll, so a value is seen up to 50 ms late.
func NewFileStore(dir string) (Store, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("rendezvous: file store: %w: choose a directory that you can write", err)
	}
	f := &fileStore{dir: dir}
	f.closed, f.close = context.WithCancelCause(context.Background())
	return f, nil
}

// path is the file of a key, whose bytes may not fit a file name.
func (f *fileStore) path(key string) string {
	return filepath.Join(f.dir, fmt.Sprintf("%x", sha256.Sum256([]byte(key))))
}

// read returns the value of a key, nil if it is not set.
func (f *fileStore) read(key string) ([]byte, error) {
	value, err := os.ReadFile(f.path(key))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	return value, err
}

// write replaces a value atomically.
func (f *fileStore) write(key string, value []byte) error {
	next := f.path(key) + newName
	if err := os.WriteFile(next, value, 0o600); err != nil {
		return err
	}
	return os.Rename(next, f.path(key))
}

// poll calls look until it returns true or an error, or ctx ends.
func (f *fileStore) poll(ctx context.Context, look func() (bool, error)) error {
	ctx, cancel := endWith(ctx, f.closed)
	defer cancel()
	for d := lookFirst; ; d = min(2*d, lookLast) {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if ok, err := look(); ok || err != nil {
			return err
		}
		pause(ctx, d)
	}
}

// locked runs change while no other rank changes the store.
func (f *fileStore) locked(ctx context.Context, change func() error) error {
	lock, err := os.OpenFile(filepath.Join(f.dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer lock.Close() // unlocks
	err = f.poll(ctx, func() (bool, error) {
		err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if errors.Is(err, unix.EWOULDBLOCK) || errors.Is(err, unix.EINTR) {
			return false, nil
		}
		return err == nil, err
	})
	if err != nil {
		return err
	}
	return change()
}

func (f *fileStore) Set(ctx context.Context, key string, value []byte) error {
	if err := checkPair(key, value); err != nil {
		return err
	}
	return f.locked(ctx, func() error { return f.write(key, value) })
}

func (f *fileStore) Get(ctx context.Context, key string) (value []byte, err error) {
	if err := checkPair(key, nil); err != nil {
		return nil, err
	}
	err = f.poll(ctx, func() (bool, error) {
		var err error
		value, err = f.read(key)
		return value != nil, err
	})
	return value, err
}

func (f *fileStore) Add(ctx context.Context, key string, delta int64) (sum int64, err error) {
	if err := checkPair(key, nil); err != nil {
		return 0, err
	}
	err = f.locked(ctx, func() error {
		value, err := f.read(key)
		if err != nil {
			return err
		}
		var text []byte
		if sum, text, err = plus(key, value, delta); err != nil {
			return err
		}
		return f.write(key, text)
	})
	return sum, err
}

func (f *fileStore) CompareAndSwap(ctx context.Context, key string, old, new []byte) (current []byte, swapped bool, err error) {
	if err := checkPair(key, new); err != nil {
		return nil, false, err
	}
	err = f.locked(ctx, func() error {
		var err error
		if current, err = f.read(key); err != nil {
			return err
		}
		if (current == nil) != (old == nil) || !bytes.Equal(current, old) {
			return nil
		}
		current, swapped = copied(new), true
		return f.write(key, new)
	})
	return current, swapped, err
}

func (f *fileStore) Close() error {
	f.close(ErrClosed)
	return nil
}
