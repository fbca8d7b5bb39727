package bucket

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"net/http"

	"github.com/minio/minio-go/v7"
	"golang.org/x/sync/errgroup"
)

// A file that is longer is written in parts of so many bytes, of which the stores take 10,000. So
// many are sent or read at once.
const (
	partBytes = 32 << 20
	atOnce    = 4
)

// Create makes a file, unless there is one.
func (d *dir) Create(name string, put func(w io.Writer) error) error {
	return d.write("create", name, put)
}

// Replace makes or replaces a file.
func (d *dir) Replace(name string, put func(w io.Writer) error) error {
	return d.write("replace", name, put)
}

func (d *dir) write(op, name string, put func(w io.Writer) error) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	u := &upload{d: d, key: d.key(name), free: make(chan []byte, atOnce+1)}
	u.wrong = func(err error) error { return d.wrong(op, name, err) }
	u.sending, u.ctx = errgroup.WithContext(ctx)
	u.sending.SetLimit(atOnce)
	if op == "create" {
		u.options.SetMatchETagExcept("*")
	}
	err := put(u)
	switch {
	case err == nil && u.id == "":
		return u.wrong(u.small())
	case err == nil:
		err = u.wrong(u.large())
	}
	if err != nil && u.id != "" {
		cancel()
		u.sending.Wait()
		err = errors.Join(err, u.wrong(d.client.AbortMultipartUpload(context.Background(),
			d.bucket, u.key, u.id)))
	}
	return err
}

// upload is a file that is written.
type upload struct {
	d       *dir
	key     string
	wrong   func(error) error // what failed
	options minio.PutObjectOptions
	ctx     context.Context // ends with the first error
	id      string          // empty until a part is sent
	part    []byte          // that is filled
	free    chan []byte     // of parts that are sent
	sending *errgroup.Group
	sent    []*minio.CompletePart
	bytes   int64 // of these
}

// Write implements io.Writer. It keeps nothing of p.
func (u *upload) Write(p []byte) (n int, err error) {
	for n < len(p) {
		if len(u.part) == partBytes {
			if err := u.send(); err != nil {
				return n, u.wrong(err)
			}
		}
		more := min(len(p)-n, partBytes-len(u.part))
		u.part = append(u.part, p[n:n+more]...)
		n += more
	}
	return n, nil
}

// send sends the part in the background, once there are not too many.
func (u *upload) send() (err error) {
	if u.id == "" {
		u.id, err = u.d.client.NewMultipartUpload(u.ctx, u.d.bucket, u.key,
			minio.PutObjectOptions{})
	}
	if err = cmp.Or(err, context.Cause(u.ctx)); err != nil {
		return err
	}
	part, is := u.part, &minio.CompletePart{PartNumber: len(u.sent) + 1}
	u.sent, u.bytes = append(u.sent, is), u.bytes+int64(len(part))
	u.sending.Go(func() error {
		got, err := u.d.client.PutObjectPart(u.ctx, u.d.bucket, u.key, u.id, is.PartNumber,
			bytes.NewReader(part), int64(len(part)), minio.PutObjectPartOptions{
				DisableContentSha256: true}) // by TLS it is left out anyway
		is.ETag = got.ETag
		u.free <- part[:0]
		return err
	})
	select {
	case u.part = <-u.free:
	default:
		u.part = nil
	}
	return nil
}

// large ends a file of parts, which exists from then on.
func (u *upload) large() error {
	err := u.send()
	if err = cmp.Or(u.sending.Wait(), err); err != nil {
		return err
	}
	var all []minio.CompletePart
	for _, part := range u.sent {
		all = append(all, *part)
	}
	_, err = u.d.client.CompleteMultipartUpload(context.Background(), u.d.bucket, u.key, u.id, all,
		u.options)
	if minio.ToErrorResponse(err).Code == minio.NoSuchUpload { // the answer to it was lost
		is, wrong := u.d.client.StatObject(context.Background(), u.d.bucket, u.key,
			minio.StatObjectOptions{})
		if wrong == nil && is.Size == u.bytes {
			return nil
		}
	}
	return err
}

// small writes a file at once. If the answer to it was lost, the next try finds the file there.
func (u *upload) small() error {
	sum := sha256.Sum256(u.part)
	u.options.DisableContentSha256 = true // there is one
	_, err := u.d.client.PutObject(u.ctx, u.d.bucket, u.key, bytes.NewReader(u.part),
		int64(len(u.part)), "", hex.EncodeToString(sum[:]), u.options)
	if minio.ToErrorResponse(err).StatusCode == http.StatusPreconditionFailed {
		there, _, _, wrong := u.d.client.GetObject(u.ctx, u.d.bucket, u.key,
			minio.GetObjectOptions{})
		if wrong != nil {
			return err
		}
		defer there.Close()
		is, wrong := io.ReadAll(io.LimitReader(there, partBytes+1))
		if wrong == nil && bytes.Equal(is, u.part) {
			return nil
		}
	}
	return err
}
