package filelock

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

func TestOneOpenFileHasTheLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	open := func() *os.File {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|NoFollow, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		return f
	}
	first, second := open(), open()
	if err := TryLock(first); err != nil {
		t.Fatal(err)
	}
	if _, err := first.WriteString("holder"); err != nil {
		t.Fatal(err)
	}
	if err := TryLock(second); !errors.Is(err, ErrHeld) {
		t.Errorf("a second lock gives %v, want ErrHeld", err)
	}
	if text, err := os.ReadFile(path); err != nil || string(text) != "holder" {
		t.Errorf("others read %q, %v, from a locked file", text, err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	if err := TryLock(second); err != nil {
		t.Errorf("after the first holder has closed it: %v", err)
	}
	if err := Remove(second, func() error { return os.Remove(path) }); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the removed file: %v", err)
	}
}
