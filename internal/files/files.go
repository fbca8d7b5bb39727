// Package files opens files that others may have written, and replaces files so that readers, and a
// machine that crashes, have the old or the new one, whole.
package files

import (
	"bufio"
	"bytes"
	"cmp"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"unicode/utf8"
)

// Open opens a file for reading that others may have written. What is no regular file, such as a
// pipe, is refused at once: a reader would wait until somebody writes to it. So is a long file that
// is nearly all holes: readers allocate by the length of a file, which costs its maker nothing.
// What Git LFS keeps in the place of a file is ErrPointer.
func Open(path string) (*os.File, error) {
	return opened(os.OpenFile(path, os.O_RDONLY|noWait, 0))
}

// OpenIn is Open in a directory, out of which no link leads.
func OpenIn(dir *os.Root, name string) (*os.File, error) {
	return opened(dir.OpenFile(name, os.O_RDONLY|noWait, 0))
}

// A file of more than mostHoles bytes may be mostOfDisk times as long as its blocks on the disk: no
// file system compresses anything but zeros that well. It is read before it is refused: ZFS has few
// blocks of what it has yet to write, too, and Lustre of what it has moved to tape.
const (
	mostHoles  = 256 << 20
	mostOfDisk = 64
)

// opened checks a file that has been opened.
func opened(f *os.File, err error) (*os.File, error) {
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	switch {
	case err != nil:
	case !info.Mode().IsRegular():
		err = fmt.Errorf("%s: %w", f.Name(), ErrNoFile)
	case pointer(f):
		err = fmt.Errorf("%s: %w", f.Name(), ErrPointer)
	case info.Size() > mostHoles && info.Size()/mostOfDisk > onDisk(info) &&
		hollow(f, info.Size()):
		err = fmt.Errorf("%s has %d bytes, of which the disk has %d: it is not whole, take "+
			"another copy", f.Name(), info.Size(), onDisk(info))
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// hollow reports whether a file has zeros everywhere but in one place, such as a header.
func hollow(f *os.File, size int64) bool {
	const places = 64
	full := 0
	for i := range int64(places) {
		var page [4096]byte
		if _, _ = f.ReadAt(page[:], size/places*i); page != [4096]byte{} { // what fails is zeros
			full++
		}
	}
	return full < 2
}

// Read returns a file of at most so many bytes, opened by Open.
func Read(path string, most int) ([]byte, error) {
	f, err := Open(path)
	return contents(f, err, path, most)
}

// contents reads a file that has been opened.
func contents(f fs.File, err error, path string, most int) ([]byte, error) {
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, int64(most)+1))
	if err == nil && len(text) > most {
		err = fmt.Errorf("%s has more than %d bytes, which are enough for such a file", path, most)
	}
	return text, err
}

// UTF8 returns the text of a file without its byte order mark, or an error if it is not UTF-8.
func UTF8(content []byte) ([]byte, error) {
	if !utf8.Valid(content) {
		return nil, errors.New("it is not UTF-8 text: convert it")
	}
	return bytes.TrimPrefix(content, []byte("\ufeff")), nil
}

// ErrPointer is the error for what Git LFS keeps in the place of a file.
var ErrPointer = errors.New("it is a pointer of Git LFS, not the file: run git lfs pull, or take " +
	"a copy by another way")

func pointer(f io.ReaderAt) bool {
	const begins = "version https://git-lfs.github.com/spec/"
	var head [len(begins)]byte
	n, _ := f.ReadAt(head[:], 0)
	return string(head[:n]) == begins
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

// ErrNoFile is the error for a path of something else, such as a directory or a pipe.
var ErrNoFile = errors.New("it is not a regular file")

// Replace makes a file with another name beside its place, and renames it when it is on the disk.
// The name is, too, when Replace returns. After an error all is as before. A link to a file stays
// one.
func Replace(path string, put func(w io.Writer) error) error {
	if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() {
		return fmt.Errorf("%s: %w", path, ErrNoFile) // such as /dev/stdout, a link to a pipe
	}
	if real, err := filepath.EvalSymlinks(path); err == nil {
		path = real
	}
	return ReplaceHere(path, put)
}

// ReplaceHere is Replace for a name that the user has not given: a link of that name, which others
// may have put there, is replaced, and what it leads to stays as it is.
func ReplaceHere(path string, put func(w io.Writer) error) error {
	if info, err := os.Lstat(path); err == nil && info.Mode().Type()&^fs.ModeSymlink != 0 {
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
func ReplaceWith(path string, text []byte) error { return Replace(path, Text(text)) }

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
