package bucket_test

import (
	"crypto/md5"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/internal/testing/objectstore"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// BenchmarkSave saves 1.3 GB, as much as GPT-2 124M with AdamW has, beside curl, which sends a file
// of this length to the same store. The store hashes what is long, as its ETag, and forgets
// it: gofakes3 hashes parts twice, and what curl sends once. With FORGETS=1 it does not hash.
//
//	go test -run '^$' -bench Save -benchtime 3x ./bucket
func BenchmarkSave(b *testing.B) {
	const bytes = 1.3e9
	s := objectstore.Start(b)
	s.Instead(func(_ int64, w http.ResponseWriter, r *http.Request, serve http.HandlerFunc) {
		switch {
		case r.Method == http.MethodPut && r.ContentLength > 1<<20:
			to, sum := io.Discard, md5.New()
			if os.Getenv("FORGETS") == "" {
				to = sum
			}
			_, err := io.CopyBuffer(struct{ io.Writer }{to}, r.Body, make([]byte, 1<<20))
			if err != nil {
				w.WriteHeader(http.StatusBadRequest)
			}
			w.Header().Set("ETag", fmt.Sprintf(`"%x"`, sum.Sum(nil)))
		case r.Method == http.MethodPost && r.URL.Query().Has("uploadId"):
			io.WriteString(w, "<CompleteMultipartUploadResult><Bucket>bucket</Bucket>"+
				"</CompleteMultipartUploadResult>")
		default:
			serve(w, r)
		}
	})
	m, err := train(autograd.Solo(), new(sync.Mutex), bytes/2/4)
	require.NoError(b, err)
	defer m.Close()
	require.NoError(b, m.RunAll())
	file := filepath.Join(b.TempDir(), "file")
	require.NoError(b, os.WriteFile(file, make([]byte, bytes), 0o600))
	var ours, theirs time.Duration
	for at := 0; b.Loop(); at++ {
		begin := time.Now()
		require.NoError(b, m.DataParallel().Save(run, m.Solver(), at, autograd.KeepLast(1)))
		ours += time.Since(begin)
		begin = time.Now()
		out, err := exec.Command("curl", "-sS", "-f", "-T", file, s.Address+"/bucket/curl").
			CombinedOutput()
		require.That(b, err == nil, "%s: %v", out, err)
		theirs += time.Since(begin)
		b.Logf("after %d, Save %.2f s, curl %.2f s", at+1, ours.Seconds(), theirs.Seconds())
	}
	b.ReportMetric(theirs.Seconds()/ours.Seconds(), "times-curl")
	b.ReportMetric(bytes*float64(b.N)/1e6/ours.Seconds(), "MB/s")
}
