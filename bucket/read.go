package bucket

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"path"
	"strings"
	"time"

	"github.com/minio/minio-go/v7"
	"golang.org/x/sync/errgroup"
)

// Of a file its first bytes are read when it is opened, which are enough for most headers and
// records. Who reads on gets more each time, up to a part.
const firstBytes = 256 << 10

var errReplaced = errors.New("it was replaced while it was read: read it again")

// object is an open file.
type object struct {
	d     *dir
	name  string
	etag  string // of what was opened
	info  info
	first []byte
	at    int64  // where Read is
	ahead []byte // what it has from there on
	more  int    // bytes that it reads next
}

// Open opens a file.
func (d *dir) Open(name string) (fs.File, error) {
	o := &object{d: d, name: name, info: info{name: path.Base(name)},
		first: make([]byte, firstBytes), more: firstBytes}
	n, err := o.get(o.first, 0)
	if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) {
		err = nil
	}
	o.first = o.first[:n]
	o.ahead = o.first
	if err != nil {
		return nil, d.wrong("open", name, err)
	}
	return o, nil
}

// get reads from a place on. The error is io.ErrUnexpectedEOF if the object ends before, and io.EOF
// if it ends there.
func (o *object) get(p []byte, from int64) (n int, err error) {
	var is minio.GetObjectOptions
	if err := is.SetRange(from, from+int64(len(p))-1); err != nil {
		return 0, err
	}
	body, got, header, err := o.d.client.GetObject(context.Background(), o.d.bucket,
		o.d.key(o.name), is)
	var wrong minio.ErrorResponse
	if errors.As(err, &wrong) && wrong.StatusCode == http.StatusRequestedRangeNotSatisfiable {
		return 0, io.EOF // it is empty
	}
	if err != nil {
		return 0, err
	}
	defer body.Close()
	if o.etag != "" && o.etag != got.ETag {
		return 0, errReplaced
	}
	if o.etag == "" {
		o.etag, o.info.time, o.info.size = got.ETag, got.LastModified, got.Size
		if _, size, ok := strings.Cut(header.Get("Content-Range"), "/"); ok {
			if _, err := fmt.Sscan(size, &o.info.size); err != nil {
				return 0, err
			}
		}
	}
	return io.ReadFull(body, p)
}

// Stat, Close, Read and ReadAt implement fs.File and io.ReaderAt.
func (o *object) Stat() (fs.FileInfo, error) { return o.info, nil }
func (o *object) Close() error               { return nil }

func (o *object) Read(p []byte) (int, error) {
	if len(o.ahead) == 0 && len(p) < o.more && o.at < o.info.size {
		o.ahead = make([]byte, min(int64(o.more), o.info.size-o.at))
		if _, err := o.ReadAt(o.ahead, o.at); err != nil {
			o.ahead = nil
			return 0, err
		}
		o.more = min(2*o.more, partBytes)
	}
	n := copy(p, o.ahead)
	o.ahead = o.ahead[n:]
	if n == 0 && len(p) > 0 { // as much as there is room for, at once
		var err error
		if n, err = o.ReadAt(p, o.at); n > 0 && errors.Is(err, io.EOF) {
			err = nil
		} else if err != nil {
			return n, err
		}
	}
	o.at += int64(n)
	return n, nil
}

func (o *object) ReadAt(p []byte, off int64) (int, error) {
	n := int(max(0, min(int64(len(p)), o.info.size-off)))
	if off >= 0 && off+int64(n) <= int64(len(o.first)) {
		copy(p[:n], o.first[min(off, int64(len(o.first))):])
	} else if err := o.fetch(p[:n], off); err != nil {
		return 0, o.d.wrong("read", o.name, err)
	}
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

// fetch reads parts at a time.
func (o *object) fetch(p []byte, off int64) error {
	var parts errgroup.Group
	parts.SetLimit(atOnce)
	for at := 0; at < len(p); at += partBytes {
		part := p[at:min(at+partBytes, len(p))]
		parts.Go(func() error { return o.part(part, off+int64(at)) })
	}
	return parts.Wait()
}

// part reads a part, and goes on if a connection ends before.
func (o *object) part(p []byte, off int64) error {
	for try := 1; ; try++ {
		n, err := o.get(p, off)
		if n == len(p) {
			return nil
		}
		if p, off = p[n:], off+int64(n); try == retries || errors.Is(err, errReplaced) ||
			errors.As(err, new(minio.ErrorResponse)) {
			return err
		}
		time.Sleep(min(time.Second, 50*time.Millisecond<<min(try, 5)))
	}
}
