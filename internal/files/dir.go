package files

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/euryale-ml/euryale/backend"
)

// Opener opens the directory of a URL, such as s3://bucket/run1. Its files have ReadAt. One that
// can be written to is a [Writer], too.
type Opener = func(url string) (fs.FS, error)

// Writer is a directory that can be written to. Names are as in package io/fs. An error of put is
// returned, and then there is no file, or the one before.
type Writer interface {
	fs.FS
	// Create makes a file, unless there is one: then the error is an fs.ErrExist.
	Create(name string, put func(w io.Writer) error) error
	// Replace makes a file, or replaces one: readers have the old or the new one, whole.
	Replace(name string, put func(w io.Writer) error) error
	Remove(name string) error
}

// ErrUnreachable is wrapped by errors of a directory whose store does not answer, or refuses to:
// they say nothing of its files.
var ErrUnreachable = errors.New("the store does not answer")

// renaming is a Writer whose directories are more than a part of the names of files.
type renaming interface {
	Writer
	Mkdir(name string) error
	Rename(from, to string) error
	Sync(name string) error // returns when the names in a directory are on the disk
}

// Dir is a directory on a disk, or one that an [Opener] has opened.
type Dir struct {
	fsys fs.FS
	at   string // in fsys
	path string // as the user names it
}

// File is an open file of a [Dir].
type File interface {
	fs.File
	io.ReaderAt
}

// Disk returns a directory on a disk.
func Disk(dir string) Dir { return Dir{disk(dir), ".", dir} }

// joined matches what filepath.Join makes of URLs, which would be a new directory on this disk.
var joined = regexp.MustCompile(`^(file|gs|s3):/[^/]`)

// At returns the directory of a path, or of a URL that the first store opens. It may not exist. If
// the path is of a file, that has the name "." in it.
func At(dir string, store ...Opener) (Dir, error) {
	if err := backend.Given("", "store", store); err != nil {
		return Dir{}, err
	}
	scheme, rest, url := strings.Cut(dir, "://")
	switch {
	case joined.MatchString(dir):
		return Dir{}, fmt.Errorf("%w: %s is no URL, which has two slashes: join its parts by "+
			"url.JoinPath, not by filepath.Join", backend.ErrArgument, dir)
	case !url:
		return Disk(dir), nil
	case scheme == "file":
		return Dir{disk(filepath.FromSlash(rest)), ".", dir}, nil
	case len(store) == 0:
		return Dir{}, fmt.Errorf("%w: %s is not on a disk: pass bucket.Open, which opens it",
			backend.ErrArgument, dir)
	}
	fsys, err := store[0](dir)
	return Dir{fsys, ".", dir}, err
}

// Sub returns a directory in it.
func (d Dir) Sub(name string) Dir { return Dir{d.fsys, d.name(name), d.Path(name)} }

func (d Dir) name(name string) string { return path.Join(d.at, name) }

// Path returns the path or the URL of a file, for users.
func (d Dir) Path(name string) string {
	if strings.Contains(d.path, "://") {
		return strings.TrimSuffix(strings.TrimSuffix(d.path, "/")+path.Join("/", name), "/")
	}
	return filepath.Join(d.path, filepath.FromSlash(name))
}

// OnDisk returns the path on this machine's disks, "" for a directory that is elsewhere.
func (d Dir) OnDisk() string {
	if on, ok := d.fsys.(disk); ok {
		return on.path(d.at)
	}
	return ""
}

// Open opens a file.
func (d Dir) Open(name string) (File, error) {
	f, err := d.fsys.Open(d.name(name))
	if err != nil {
		return nil, err
	}
	if f, ok := f.(File); ok {
		return f, nil
	}
	return nil, errors.Join(fmt.Errorf("%w: %s has no ReadAt", backend.ErrUnsupported,
		d.Path(name)), f.Close())
}

// Stat describes what a name leads to.
func (d Dir) Stat(name string) (fs.FileInfo, error) { return fs.Stat(d.fsys, d.name(name)) }

// Lstat describes what a name is, such as a link.
func (d Dir) Lstat(name string) (fs.FileInfo, error) { return fs.Lstat(d.fsys, d.name(name)) }

// ReadDir lists a directory, sorted by name.
func (d Dir) ReadDir(name string) ([]fs.DirEntry, error) { return fs.ReadDir(d.fsys, d.name(name)) }

// Read returns a file of at most so many bytes.
func (d Dir) Read(name string, most int) ([]byte, error) {
	f, err := d.Open(name)
	return contents(f, err, d.Path(name), most)
}

// ReadJSON unmarshals a file of at most so many bytes, and returns its text.
func (d Dir) ReadJSON(name string, most int, to any) (text []byte, err error) {
	if text, err = d.Read(name, most); err != nil {
		return nil, err // which names the file
	}
	if err = json.Unmarshal(text, to); err != nil {
		err = fmt.Errorf("%s is damaged: %w: take another copy", d.Path(name), err)
	}
	return text, err
}

// Create makes a file: see [Writer].
func (d Dir) Create(name string, put func(io.Writer) error) error {
	return d.write(func(w Writer) error { return w.Create(d.name(name), put) })
}

// Replace makes or replaces a file: see [Writer].
func (d Dir) Replace(name string, put func(io.Writer) error) error {
	return d.write(func(w Writer) error { return w.Replace(d.name(name), put) })
}

// Remove removes a file: see [Writer].
func (d Dir) Remove(name string) error {
	return d.write(func(w Writer) error { return w.Remove(d.name(name)) })
}

func (d Dir) write(f func(Writer) error) error {
	if w, ok := d.fsys.(Writer); ok {
		return f(w)
	}
	return fmt.Errorf("%w: %s can only be read", backend.ErrUnsupported, d.path)
}

// Renames reports whether a directory can be renamed. Elsewhere its name is a part of those of its
// files, and Mkdir and Sync do nothing.
func (d Dir) Renames() bool {
	_, ok := d.fsys.(renaming)
	return ok
}

// Mkdir makes a directory, unless there is one: then the error is an fs.ErrExist.
func (d Dir) Mkdir(name string) error {
	if w, ok := d.fsys.(renaming); ok {
		return w.Mkdir(d.name(name))
	}
	return nil
}

// Rename renames a directory, if it [Renames].
func (d Dir) Rename(from, to string) error {
	return d.fsys.(renaming).Rename(d.name(from), d.name(to))
}

// Sync returns when the names in a directory are on the disk.
func (d Dir) Sync(name string) error {
	if w, ok := d.fsys.(renaming); ok {
		return w.Sync(d.name(name))
	}
	return nil
}

// Text is for Create and Replace.
func Text(text []byte) func(w io.Writer) error {
	return func(w io.Writer) error {
		_, err := w.Write(text)
		return err
	}
}

// disk is a directory on a disk, by its path.
type disk string

func (d disk) path(name string) string {
	return filepath.Join(cmp.Or(string(d), "."), filepath.FromSlash(name))
}

func (d disk) Open(name string) (fs.File, error) {
	f, err := Open(d.path(name))
	if err != nil {
		return nil, err
	}
	return f, nil
}

func (d disk) Stat(name string) (fs.FileInfo, error)      { return os.Stat(d.path(name)) }
func (d disk) Lstat(name string) (fs.FileInfo, error)     { return os.Lstat(d.path(name)) }
func (d disk) ReadLink(name string) (string, error)       { return os.Readlink(d.path(name)) }
func (d disk) ReadDir(name string) ([]fs.DirEntry, error) { return os.ReadDir(d.path(name)) }
func (d disk) Mkdir(name string) error                    { return os.Mkdir(d.path(name), 0o777) }
func (d disk) Sync(name string) error                     { return SyncDir(d.path(name)) }
func (d disk) Replace(name string, put func(io.Writer) error) error {
	return Replace(d.path(name), put)
}

func (d disk) Rename(from, to string) error {
	return os.Rename(d.path(from), d.path(to))
}

// Create makes a file that others may see before it is whole.
func (d disk) Create(name string, put func(io.Writer) error) (err error) {
	f, err := os.OpenFile(d.path(name), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	to := bufio.NewWriter(f)
	if err = put(to); err != nil {
		return err
	}
	return errors.Join(to.Flush(), f.Sync())
}

// Remove follows no link out of the directory.
func (d disk) Remove(name string) error {
	root, err := os.OpenRoot(d.path("."))
	if err != nil {
		return err
	}
	return errors.Join(root.Remove(filepath.FromSlash(name)), root.Close())
}
