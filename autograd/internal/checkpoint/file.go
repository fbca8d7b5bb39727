package checkpoint

import (
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"

	"github.com/euryale-ml/euryale/internal/files"
)

// WriteFile writes a new file and returns when it will stay.
func WriteFile(in files.Dir, name string, write func(w io.Writer) error) (File, error) {
	sum, n := NewChecksum(), &counted{}
	err := in.Create(name, func(to io.Writer) error {
		n.w = io.MultiWriter(to, sum)
		return write(n)
	})
	return File{path.Base(name), n.n, Text(sum)}, err
}

// counted counts what is written.
type counted struct {
	w io.Writer
	n int64
}

// Write implements io.Writer.
func (c *counted) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	c.n += int64(n)
	return n, err
}

// makeDir makes a directory, and those above it, unless it exists. They are on the disk then. It
// returns what it has made.
func makeDir(dir string) (made []string, err error) {
	info, err := os.Stat(dir)
	if err == nil && !info.IsDir() {
		return nil, fmt.Errorf("%s is not a directory: name another one", dir)
	}
	if !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	above := filepath.Dir(dir)
	if made, err = makeDir(above); err != nil {
		return made, err
	}
	if err = os.Mkdir(dir, 0o777); err == nil {
		made = append(made, dir)
	} else if !errors.Is(err, os.ErrExist) {
		return made, err
	}
	return made, files.SyncDir(above)
}

// Reader reads a file of a checkpoint from its beginning to its end.
type Reader struct {
	Bytes int64 // how long it is
	f     files.File
	path  string
	sum   hash.Hash32
	want  File // empty if the record says nothing
}

// Open opens a file of the checkpoint in a directory. The error is a [*Damaged] if it is missing or
// has another length than the record says.
func Open(in files.Dir, s Stamp, name string) (*Reader, error) {
	r := &Reader{sum: NewChecksum(), path: in.Path(name)}
	info, err := in.Stat(name)
	if err == nil {
		r.Bytes = info.Size()
		err = r.expect(s, name)
	}
	if err == nil {
		r.f, err = in.Open(name)
	}
	if err != nil {
		return nil, damagedFile(r.path, err)
	}
	return r, nil
}

// expect finds what the record says of the file.
func (r *Reader) expect(s Stamp, name string) error {
	if s.ID == "" {
		return nil
	}
	i := slices.IndexFunc(s.Files, func(f File) bool { return f.Name == name })
	if i < 0 {
		return errors.New("it is not in the record")
	}
	r.want = s.Files[i]
	return r.want.long(r.Bytes)
}

// long returns an error if the file has not so many bytes.
func (f File) long(bytes int64) error {
	if bytes != f.Bytes {
		return fmt.Errorf("it has %d bytes, the record says %d", bytes, f.Bytes)
	}
	return nil
}

// Read implements io.Reader.
func (r *Reader) Read(p []byte) (int, error) {
	n, err := r.f.Read(p)
	r.sum.Write(p[:n])
	return n, err
}

// Check returns a [*Damaged] if the file, which was read to its end, is not the one in the record.
func (r *Reader) Check() error {
	if is := Text(r.sum); r.want.Name != "" && is != r.want.Checksum {
		err := fmt.Errorf("its checksum is %s, the record says %s", is, r.want.Checksum)
		return &Damaged{Path: r.path, Cause: err}
	}
	return nil
}

// Close closes the file.
func (r *Reader) Close() error { return r.f.Close() }
