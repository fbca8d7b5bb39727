// Package bucket opens directories in object stores, for checkpoints, models and data sets. Only
// programs that import it link a client:
//
//	autograd.WithStore(bucket.Open)                     // an option of vm.WithDataParallel, too
//	err := dp.Save("s3://bucket/run1", solver, progress)
//	weights, err := autograd.ReadWeights("s3://bucket/run1", bucket.Open)
//	model, err := models.Load("gs://bucket/Llama-3.2-1B", bucket.Open)
//	set, classes, err := data.Source(bucket.Open).CSV("s3://bucket/iris.csv", "species")
//
// A file is written in parts of 32 MiB, four at a time, so it has at most 320 GB, and appears whole
// or not at all. It is read in ranges: who needs a part of it reads that. A request that fails is
// sent again, up to 20 times within about 10 seconds. If that does not help, the error names the
// object, and says what to do; it never says that the object does not exist.
//
// Credentials and addresses come from where the provider's own tools have them:
//
//   - s3://bucket/prefix: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN; otherwise
//     AWS_PROFILE and AWS_SHARED_CREDENTIALS_FILE; otherwise the role of the machine, container or
//     pod; otherwise none, for public buckets. AWS_REGION. AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL
//     is the address of another store with this interface, such as MinIO, Ceph or R2.
//   - gs://bucket/prefix: GS_ACCESS_KEY_ID and GS_SECRET_ACCESS_KEY, an HMAC key; otherwise the
//     file of GOOGLE_APPLICATION_CREDENTIALS, of an account, a user or a federation of workload
//     identities; otherwise what gcloud auth application-default login has left; otherwise the
//     account of the machine or pod. CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE is the address of a
//     region or of a private network, STORAGE_EMULATOR_HOST that of an emulator, which needs no
//     credentials.
//
// The account reads, writes, lists and deletes objects, and aborts uploads in parts. A process that
// is killed may leave parts that no listing shows: let the bucket's lifecycle remove incomplete
// uploads after some days.
package bucket
