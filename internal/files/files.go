// Package files replaces files so that readers, and a machine that crashes, have the old or the new
// one, whole, and reads them with a bound.
package files

import (
	"bufio"
	"cmp"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
)

// Read returns a file of at most so many bytes, which others may have written.
func Read(path string, most int) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if err := Pointer(f); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	text, err := io.ReadAll(io.LimitReader(f, int64(most)+1))
	if err == nil && len(text) > most {
		err = fmt.Errorf("%s has more than %d bytes, which are enough for such a file", path, most)
	}
	return text, err
}

// Pointer returns an error if a file is what Git LFS keeps in the place of one.
func Pointer(f io.ReaderAt) error {
	const begins = "version https://git-lfs.github.com/spec/"
	var head [len(begins)]byte
	if n, _ := f.ReadAt(head[:], 0); string(head[:n]) == begins {
		return errors.New("it is a pointer of Git LFS, not the file: run git lfs pull, or take a " +
			"copy by another way")
	}
	return nil
}

// Empty reports whether a value of JSON is null, false or has no elements.
func Empty(text json.RawMessage) bool {
	var v any
	_ = json.Unmarshal(text, &v) // nil if it is damaged, which whoever reads it says
	switch v := v.(type) {
	case bool:
		return !v
	case string:
		return v == ""
	case []any:
		return len(v) == 0
	case map[string]any:
		return len(v) == 0
	}
	return v == nil
}

// ErrNoFile is the error of Replace for a path of something else, such as a directory.
var ErrNoFile = errors.New("it is no file")

// Replace makes a file with another name beside its place, and renames it when it is on the disk.
// The name is, too, when Replace returns. After an error all is as before. A link to a file stays
// one.
func Replace(path string, put func(w io.Writer) error) error {
	if real, err := filepath.EvalSymlinks(path); err == nil {
		path = real
	}
	if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() {
		return fmt.Errorf("%s: %w", path, ErrNoFile)
	}
	dir, base := filepath.Split(path)
	temporary := filepath.Join(dir, fmt.Sprintf(".%s.%s", base, rand.Text()))
	f, err := os.OpenFile(temporary, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if err != nil {
		return err
	}
	to := bufio.NewWriter(f)
	if err = put(to); err == nil {
		err = errors.Join(to.Flush(), f.Sync())
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(temporary, path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(temporary))
	}
	return SyncDir(cmp.Or(dir, "."))
}

// ReplaceWith is Replace with a text.
func ReplaceWith(path string, text []byte) error {
	return Replace(path, func(w io.Writer) error {
		_, err := w.Write(text)
		return err
	})
}

// SyncDir returns when the names in a directory are on the disk. Windows offers nothing for that.
func SyncDir(dir string) error {
	if runtime.GOOS == "windows" {
		return nil
	}
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	err = f.Sync()
	if errors.Is(err, syscall.EINVAL) { // some network file systems do not support it
		err = nil
	}
	return errors.Join(err, f.Close())
}
