package bucket

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/files"
)

// Open returns the directory of a URL, s3://bucket/prefix or gs://bucket/prefix, with the methods
// that autograd.WithStore describes. The directory need not exist. It sends no request, except for
// the credentials of gs. The result is for any number of goroutines.
//
// Errors: [backend.ErrArgument] for another URL; no credentials for gs, or some that are refused.
func Open(url string) (fs.FS, error) {
	scheme, rest, _ := strings.Cut(url, "://")
	name, prefix, _ := strings.Cut(rest, "/")
	d := &dir{scheme: scheme, bucket: name, prefix: strings.Trim(path.Clean("/"+prefix), "/")}
	var address string
	options := &minio.Options{MaxRetries: retries}
	var err error
	switch {
	case name == "" || scheme != "s3" && scheme != "gs":
		err = fmt.Errorf("%w: want s3://bucket/prefix or gs://bucket/prefix", backend.ErrArgument)
	case scheme == "s3":
		address, err = d.amazon(options)
	default:
		address, err = d.google(options)
	}
	if err == nil {
		d.client.Client, err = minio.New(address, options)
	}
	if err != nil {
		return nil, fmt.Errorf("bucket: open %s: %w", url, err)
	}
	return d, nil
}

// retries is how often a request is sent. Waits between grow to 1 s, half of it on average.
const retries = 20

// dir is a directory in a bucket: the objects whose keys begin with a prefix.
type dir struct {
	scheme, bucket, prefix string
	client                 minio.Core
	hint                   string // what to do without permission
}

// amazon sets the options for S3, and returns the address.
func (d *dir) amazon(o *minio.Options) (string, error) {
	d.hint = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, of an account " +
		"that may do so, and AWS_REGION or AWS_ENDPOINT_URL"
	// Where there is no such role nobody answers.
	machine := &credentials.IAM{Client: &http.Client{Timeout: 5 * time.Second}}
	o.Creds = credentials.NewChainCredentials([]credentials.Provider{
		&credentials.EnvAWS{}, &credentials.FileAWSCredentials{}, machine,
	})
	o.Region = cmp.Or(os.Getenv("AWS_REGION"), os.Getenv("AWS_DEFAULT_REGION"))
	at := cmp.Or(os.Getenv("AWS_ENDPOINT_URL_S3"), os.Getenv("AWS_ENDPOINT_URL"),
		"https://s3.amazonaws.com")
	if strings.HasPrefix(at, googleAddress) { // whose conditional headers have other names
		return "", fmt.Errorf("%w: AWS_ENDPOINT_URL is Google's: use gs://%s, with the key in "+
			"GS_ACCESS_KEY_ID and GS_SECRET_ACCESS_KEY", backend.ErrArgument,
			path.Join(d.bucket, d.prefix))
	}
	return address(o, at), nil
}

// address returns the host of an address, and notes whether it is reached by TLS.
func address(o *minio.Options, url string) string {
	scheme, host, _ := strings.Cut(url, "://")
	o.Secure = scheme == "https"
	return strings.TrimSuffix(host, "/")
}

// key returns the key of a file's object.
func (d *dir) key(name string) string { return path.Join("/", d.prefix, name)[1:] }

// wrong says what could not be done with a file, and what to do.
func (d *dir) wrong(op, name string, err error) error {
	var is minio.ErrorResponse
	switch {
	case err == nil || errors.Is(err, fs.ErrNotExist) || errors.Is(err, errReplaced):
	case !errors.As(err, &is):
		err = fmt.Errorf("%w: %w", files.ErrUnreachable, err)
	case is.Code == minio.NoSuchKey || is.StatusCode == http.StatusNotFound &&
		is.Code != minio.NoSuchBucket:
		err = fs.ErrNotExist
	case is.StatusCode == http.StatusPreconditionFailed:
		err = fs.ErrExist
	case is.StatusCode == http.StatusForbidden || is.StatusCode == http.StatusUnauthorized:
		err = fmt.Errorf("%w: %s (%s): %s", files.ErrUnreachable, is.Message, is.Code, d.hint)
	case is.Code == minio.NoSuchBucket:
		err = fmt.Errorf("%w: there is no such bucket: make it, or name another one",
			files.ErrUnreachable)
	default:
		err = fmt.Errorf("%w after %d tries: %s (%s)", files.ErrUnreachable, retries, is.Message,
			is.Code)
	}
	if err == nil {
		return nil
	}
	object := d.scheme + "://" + path.Join(d.bucket, d.key(name))
	return &fs.PathError{Op: op, Path: object, Err: err}
}

// Remove removes an object. One that is missing is no error.
func (d *dir) Remove(name string) error {
	err := d.client.RemoveObject(context.Background(), d.bucket, d.key(name),
		minio.RemoveObjectOptions{})
	if err = d.wrong("remove", name, err); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// Stat describes an object, or a directory: what the keys of others begin with.
func (d *dir) Stat(name string) (fs.FileInfo, error) {
	i := info{name: path.Base(name), folder: true}
	if d.key(name) == "" {
		return i, nil
	}
	o, err := d.client.StatObject(context.Background(), d.bucket, d.key(name),
		minio.StatObjectOptions{})
	if err = d.wrong("stat", name, err); err == nil {
		return info{i.name, o.Size, o.LastModified, false}, nil
	}
	if errors.Is(err, fs.ErrNotExist) {
		below, wrong := d.client.ListObjectsV2(d.bucket, d.key(name)+"/", "", "", "/", 1)
		if wrong != nil || len(below.Contents)+len(below.CommonPrefixes) > 0 {
			err = d.wrong("stat", name, wrong)
		}
	}
	return i, err
}

// ReadDir lists a directory.
func (d *dir) ReadDir(name string) (all []fs.DirEntry, err error) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	prefix := d.key(name)
	if prefix != "" {
		prefix += "/"
	}
	of := minio.ListObjectsOptions{Prefix: prefix}
	for o := range d.client.Client.ListObjects(ctx, d.bucket, of) {
		if o.Err != nil {
			return nil, d.wrong("list", name, o.Err)
		}
		key := strings.TrimPrefix(o.Key, prefix)
		i := info{strings.TrimSuffix(key, "/"), o.Size, o.LastModified, strings.HasSuffix(key, "/")}
		all = append(all, fs.FileInfoToDirEntry(i))
	}
	if len(all) == 0 && prefix != "" {
		return nil, d.wrong("list", name, fs.ErrNotExist)
	}
	slices.SortFunc(all, func(a, b fs.DirEntry) int { return cmp.Compare(a.Name(), b.Name()) })
	return all, nil
}

// info describes an object or a directory.
type info struct {
	name   string
	size   int64
	time   time.Time
	folder bool
}

// Name and the others implement fs.FileInfo.
func (i info) Name() string       { return i.name }
func (i info) Size() int64        { return i.size }
func (i info) ModTime() time.Time { return i.time }
func (i info) IsDir() bool        { return i.folder }
func (i info) Sys() any           { return nil }
func (i info) Mode() fs.FileMode {
	if i.folder {
		return fs.ModeDir | 0o777
	}
	return 0o666
}

var _ interface {
	files.Writer
	fs.StatFS
	fs.ReadDirFS
} = &dir{}

var _ interface {
	fs.File
	io.ReaderAt
} = &object{}
