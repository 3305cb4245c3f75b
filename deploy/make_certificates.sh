#!/bin/sh
# Make your own certificate authority, and certificates signed by it for Dask's scheduler, workers and clients.
#
#   deploy/make_certificates.sh FOLDER [DAYS]
#   . FOLDER/tls.sh                              # Dask's settings, on every host that sees the folder at the same path
#
# Dask checks that the other side has a certificate of this authority, but not its host name: anyone with one of these
# keys can run code on the cluster. ca-key.pem can sign new certificates: move it away from the machines that run jobs.
set -eu

folder=${1:?the folder to write to is missing}
days=${2:-365}
# Only the owner may ever read the files.
umask 077
mkdir -p "$folder"
cd "$folder"
if [ -e ca-key.pem ]; then
    echo "$folder has certificates already; move them away to make new ones" >&2
    exit 2
fi

openssl req -x509 -newkey rsa:3072 -sha256 -nodes -days "$days" -subj "/CN=precision-time Dask authority" \
    -addext "basicConstraints=critical,CA:TRUE,pathlen:0" -addext "keyUsage=critical,keyCertSign" \
    -keyout ca-key.pem -out ca.pem 2>/dev/null
for role in scheduler worker client; do
    openssl req -newkey rsa:3072 -sha256 -nodes -subj "/CN=precision-time Dask $role" \
        -keyout "$role-key.pem" -out "$role.csr" 2>/dev/null
    # A worker is a client of the scheduler and a server for its peers, so every certificate allows both.
    printf 'basicConstraints=critical,CA:FALSE\nextendedKeyUsage=serverAuth,clientAuth\n' > "$role.ext"
    openssl x509 -req -in "$role.csr" -sha256 -days "$days" -CA ca.pem -CAkey ca-key.pem -CAcreateserial \
        -extfile "$role.ext" -out "$role.pem" 2>/dev/null
    rm "$role.csr" "$role.ext"
done
rm -f ca.srl
{
    echo "export DASK_DISTRIBUTED__COMM__TLS__CA_FILE='$PWD/ca.pem'"
    for role in scheduler worker client; do
        name=$(echo "$role" | tr '[:lower:]' '[:upper:]')
        echo "export DASK_DISTRIBUTED__COMM__TLS__${name}__CERT='$PWD/$role.pem'"
        echo "export DASK_DISTRIBUTED__COMM__TLS__${name}__KEY='$PWD/$role-key.pem'"
    done
} > tls.sh
# Certificates may be public, keys may not.
chmod 644 ca.pem scheduler.pem worker.pem client.pem
echo "wrote ca, scheduler, worker and client certificates to $folder, good for $days days"
