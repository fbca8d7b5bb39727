package bucket

import (
	"net/http"
	"testing"
	"time"

	"github.com/minio/minio-go/v7/pkg/signer"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// TestSignaturesAreAmazonsInOtherWords: with Amazon's words its client makes the same.
func TestSignaturesAreAmazonsInOtherWords(t *testing.T) {
	for _, url := range []string{"https://host/bucket/a/b", "https://host/bucket/a%20b+c?uploads=",
		"https://host/bucket/?delimiter=%2F&list-type=2&prefix=x+y"} {
		r := require.Value(http.NewRequest(http.MethodPut, url, nil))(t)
		r.Header.Set("X-Amz-Content-Sha256", "UNSIGNED-PAYLOAD")
		r.Header.Set("X-Amz-Other", "1")
		want := signer.SignV4(*r.Clone(t.Context()), "id", "secret", "", "auto")
		at := require.Value(time.Parse("20060102T150405Z", want.Header.Get("X-Amz-Date")))(t)
		s := signature{id: "id", secret: "secret",
			words: words{"AWS4-HMAC-SHA256", "AWS4", "s3", "X-Amz-"}}
		s.sign(r, at)
		require.Equal(t, url, r.Header.Get("Authorization"), want.Header.Get("Authorization"))
	}
}
