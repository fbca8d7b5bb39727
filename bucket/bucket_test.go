package bucket_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"strings"
	"testing"

	// Gorgonia's modules name cloud.google.com/go 0.34, which has the package that another module
	// has by now. A newer one, for which go.mod needs an import, keeps it unambiguous for users.
	_ "cloud.google.com/go/civil"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/bucket"
	"github.com/euryale-ml/euryale/internal/files"
	"github.com/euryale-ml/euryale/internal/testing/objectstore"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// part is the length of a part of a file.
const part = 32 << 20

// open opens a directory of a store.
func open(t *testing.T, url string) files.Dir {
	t.Helper()
	return require.Value(files.At(url, bucket.Open))(t)
}

// pattern returns bytes of which no two parts are alike.
func pattern(n int) []byte {
	all := make([]byte, n)
	for i := range all {
		all[i] = byte(i ^ i>>8 ^ i>>16 ^ i>>24)
	}
	return all
}

func TestFilesComeBackAsTheyWereRaced(t *testing.T) {
	objectstore.Start(t)
	in := open(t, objectstore.URL+"/some/where")
	for _, n := range []int{0, 1, 256<<10 - 1, 256 << 10, 256<<10 + 1, part, part + 1, 2*part + 7} {
		want := pattern(n)
		require.NoError(t, in.Create("f", files.Text(want)))
		f := require.Value(in.Open("f"))(t)
		info := require.Value(f.Stat())(t)
		require.Equal(t, "the length", info.Size(), int64(n))
		for _, buffer := range []int{max(4096, n/100), n + 1} {
			f := require.Value(in.Open("f"))(t)
			var got bytes.Buffer
			_, err := io.CopyBuffer(struct{ io.Writer }{&got}, struct{ io.Reader }{f},
				make([]byte, buffer))
			require.Check(t, err == nil && bytes.Equal(got.Bytes(), want), "%d bytes, %d at a "+
				"time: %d others, %v", n, buffer, got.Len(), err)
		}
		for _, at := range []int{0, n / 2, n - 1, n} {
			some := make([]byte, 100)
			got, err := f.ReadAt(some, int64(at))
			rest := min(100, n-at)
			require.Check(t, at < 0 || got == rest && bytes.Equal(some[:got], want[at:at+rest]) &&
				(err == nil || rest < 100 && err == io.EOF), "%d of %d bytes at %d: %v", got, n, at,
				err)
		}
		require.NoError(t, in.Remove("f"))
	}
	require.NoError(t, in.Remove("f")) // which is not there
}

func TestAFileIsThereOnceItIsWhole(t *testing.T) {
	objectstore.Start(t)
	in := open(t, objectstore.URL)
	enough := errors.New("enough")
	for _, n := range []int{10, part + 10, 9 * part} {
		err := in.Create("f", func(w io.Writer) error {
			_, err := w.Write(make([]byte, n))
			_, none := in.Stat("f")
			require.Check(t, errors.Is(none, fs.ErrNotExist), "after %d bytes: %v", n, none)
			return errors.Join(err, enough)
		})
		require.Fails(t, "Create", err, enough)
		require.Fails(t, "Stat", require.Err(in.Stat("f")), fs.ErrNotExist)
	}
	require.NoError(t, in.Create("f", files.Text([]byte("one"))))
	require.Fails(t, "Create", in.Create("f", files.Text([]byte("two"))), fs.ErrExist,
		"s3://bucket/f")
	require.NoError(t, in.Replace("f", files.Text([]byte("three"))))
	require.Equal(t, "the file", string(require.Value(in.Read("f", 9))(t)), "three")
}

func TestDirectoriesAreBeginningsOfNames(t *testing.T) {
	objectstore.Start(t)
	in := open(t, objectstore.URL+"/a/")
	require.Fails(t, "ReadDir", require.Err(in.ReadDir(".")), fs.ErrNotExist, "s3://bucket/a")
	for _, name := range []string{"b/c", "b/d/e", "b-c", "bb"} {
		require.NoError(t, in.Create(name, files.Text([]byte(name))))
	}
	list := func(name string) (all []string) {
		for _, e := range require.Value(in.ReadDir(name))(t) {
			all = append(all, fmt.Sprintf("%s %v %d", e.Name(), e.IsDir(),
				require.Value(e.Info())(t).Size()))
		}
		return all
	}
	require.Slices(t, "a", list("."), []string{"b true 0", "b-c false 3", "bb false 2"})
	require.Slices(t, "a/b", list("b"), []string{"c false 3", "d true 0"})
	info := require.Value(in.Stat("b"))(t)
	require.Check(t, info.IsDir(), "b is %v", info)
	require.Fails(t, "Stat", require.Err(in.Stat("c")), fs.ErrNotExist)
	require.Equal(t, "its path", in.Sub("b").Path("c"), "s3://bucket/a/b/c")
	require.NoError(t, open(t, objectstore.URL).Create(".a/b.", files.Text([]byte("hidden"))))
	in = open(t, objectstore.URL+"/.a")
	require.Slices(t, ".a", list("."), []string{"b. false 6"})
	require.Equal(t, "its file", string(require.Value(in.Read("b.", 9))(t)), "hidden")
}

// Whatever becomes of a request, the next try of it helps.
func TestRequestsThatFailAreSentAgain(t *testing.T) {
	s := objectstore.Start(t)
	in := open(t, objectstore.URL)
	want := pattern(part + 1000)
	for name, fail := range map[string]objectstore.Answer{
		"busy": func(_ int64, w http.ResponseWriter, _ *http.Request, _ http.HandlerFunc) {
			w.WriteHeader(http.StatusServiceUnavailable)
		},
		"lost": func(_ int64, _ http.ResponseWriter, r *http.Request, serve http.HandlerFunc) {
			serve(objectstore.Nobody(), r)
			panic(http.ErrAbortHandler)
		},
	} {
		t.Run(name, func(t *testing.T) {
			s.Instead(func(n int64, w http.ResponseWriter, r *http.Request,
				serve http.HandlerFunc) {
				if n%3 == 1 {
					fail(n, w, r, serve)
				} else {
					serve(w, r)
				}
			})
			defer s.Instead(nil)
			require.NoError(t, in.Create("small", files.Text(want[:1000])))
			require.NoError(t, in.Create("large", files.Text(want)))
			for file, want := range map[string][]byte{"small": want[:1000], "large": want} {
				got, err := in.Read(file, 2*part)
				require.Check(t, err == nil && bytes.Equal(got, want), "%s: %d bytes: %v", file,
					len(got), err)
				require.NoError(t, in.Remove(file))
			}
		})
	}
}

// A connection that ends in the middle of an answer costs no more than the rest of it.
func TestAnswersThatEndEarlyGoOn(t *testing.T) {
	s := objectstore.Start(t)
	in := open(t, objectstore.URL)
	want := pattern(part)
	require.NoError(t, in.Create("f", files.Text(want)))
	s.Instead(func(n int64, w http.ResponseWriter, r *http.Request, serve http.HandlerFunc) {
		if n == 2 {
			w = &short{w, 1 << 20}
		}
		serve(w, r)
	})
	f := require.Value(in.Open("f"))(t)
	got := make([]byte, part)
	n, err := f.ReadAt(got, 0)
	require.Check(t, n == part && err == nil && bytes.Equal(got, want), "%d bytes: %v", n, err)
	require.Check(t, s.Requests.Load() == 3, "%d requests", s.Requests.Load())
}

// short ends a connection after some bytes.
type short struct {
	http.ResponseWriter
	left int
}

// Write implements io.Writer.
func (s *short) Write(p []byte) (int, error) {
	if s.left -= len(p); s.left < 0 {
		panic(http.ErrAbortHandler)
	}
	return s.ResponseWriter.Write(p)
}

func TestAFileThatIsReplacedMeanwhileIsAnError(t *testing.T) {
	objectstore.Start(t)
	in := open(t, objectstore.URL)
	require.NoError(t, in.Create("f", files.Text(make([]byte, 1<<20))))
	f := require.Value(in.Open("f"))(t)
	require.NoError(t, in.Replace("f", files.Text(make([]byte, 2<<20))))
	require.Fails(t, "Read", require.Err(io.ReadAll(f)), "s3://bucket/f", "replaced")
}

// What is not there, what may not be read, and what does not answer are different errors.
func TestErrorsSayWhichObjectAndWhatToDo(t *testing.T) {
	s := objectstore.Start(t)
	in := open(t, objectstore.URL)
	require.Fails(t, "Open", require.Err(in.Open("f")), fs.ErrNotExist, "s3://bucket/f")
	for status, says := range map[int]string{403: "AWS_ACCESS_KEY_ID", 400: "does not answer"} {
		s.Instead(func(_ int64, w http.ResponseWriter, _ *http.Request, _ http.HandlerFunc) {
			w.WriteHeader(status)
		})
		for op, f := range map[string]func() error{
			"open":    func() error { return require.Err(in.Open("f")) },
			"stat":    func() error { return require.Err(in.Stat("f")) },
			"list":    func() error { return require.Err(in.ReadDir("f")) },
			"create":  func() error { return in.Create("f", files.Text(nil)) },
			"replace": func() error { return in.Replace("f", files.Text(make([]byte, 2*part))) },
			"remove":  func() error { return in.Remove("f") },
		} {
			err := f()
			require.Fails(t, op, err, files.ErrUnreachable, op+" s3://bucket/f", says)
			require.Check(t, !errors.Is(err, fs.ErrNotExist), "%s: %v", op, err)
		}
	}
	s.Instead(nil)
	other := open(t, "s3://another")
	require.Fails(t, "List", require.Err(other.ReadDir(".")), files.ErrUnreachable,
		"no such bucket")
	for _, url := range []string{"s3:///x", "http://bucket/x"} {
		require.Fails(t, url, require.Err(bucket.Open(url)), backend.ErrArgument, url)
	}
	require.Fails(t, "joined as a path", require.Err(files.At("s3:/bucket/x", bucket.Open)),
		backend.ErrArgument, "url.JoinPath")
	require.Fails(t, "without a store", require.Err(files.At("s3://bucket/x")), backend.ErrArgument,
		"bucket.Open")
}

// Google's store takes other words for some conditions.
func TestCloudStorageIsReachedByItsOwnVariables(t *testing.T) {
	s := objectstore.Start(t)
	var seen []string
	s.Instead(func(_ int64, w http.ResponseWriter, r *http.Request, serve http.HandlerFunc) {
		if r.Method == http.MethodPut {
			seen = append(seen, r.Header.Get("X-Goog-If-Generation-Match")+
				r.Header.Get("If-None-Match")+r.Header.Get("Authorization"))
		}
		serve(w, r)
	})
	t.Setenv("STORAGE_EMULATOR_HOST", strings.TrimPrefix(s.Address, "http://"))
	in := open(t, "gs://bucket/run")
	require.NoError(t, in.Create("f", files.Text([]byte("x"))))
	require.NoError(t, in.Replace("f", files.Text([]byte("y"))))
	require.Slices(t, "the conditions", seen, []string{"0", ""})
	require.Equal(t, "the file", string(require.Value(in.Read("f", 9))(t)), "y")
	require.Equal(t, "its path", in.Path("f"), "gs://bucket/run/f")
}
